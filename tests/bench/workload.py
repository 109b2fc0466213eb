"""A model, its adapters and the engine's settings in a folder, and the commands that serve and
score them. Made once; whoever comes with the same wishes finds them there.
"""

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.shapes import SHAPES, adapted_weights, cut_layers, write_adapter, write_model

FIRST_ADAPTER_SEED = 100


@dataclass(frozen=True)
class Wishes:
    """What to make. layers: 0 = all of the shape's;  seed: of the weights, adapters follow it."""

    shape: str
    adapters: int
    lora_rank: int
    layers: int = 0
    seed: int = 7
    tokens_in: int = 1600
    tokens_out: int = 600
    max_clients: int = 32
    engine: str = "{}"  # JSON fields of EngineConfig over those chosen here

    @property
    def label(self) -> str:
        return self.shape + (f"/{self.layers} layers" if self.layers else "")


@dataclass(frozen=True)
class Workload:
    """What lies in a folder."""

    wishes: Wishes
    folder: Path
    config: dict[str, Any]
    names: tuple[str, ...]

    @property
    def experts(self) -> int:
        return SHAPES[self.wishes.shape].experts

    @property
    def top_k(self) -> int:
        return SHAPES[self.wishes.shape].top_k

    @property
    def options(self) -> list[str]:
        """What both commands are told."""
        words = ["--model", str(self.folder / "model"), "--config", str(self.folder / "run.json")]
        words += ["--load-format", f"random:{self.wishes.seed}"]
        if self.names:
            words += ["--adapters", ",".join(f"{n}={self.folder / n}" for n in self.names)]
        return words

    @property
    def serve(self) -> list[str]:
        return [sys.executable, "-m", "model_runner", "serve-stdio", *self.options]

    @property
    def logits(self) -> list[str]:
        return [sys.executable, "-m", "model_runner", "logits", *self.options]

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return dict(json.loads((self.folder / "run.json").read_text()))


def adapter_values(config: dict[str, Any], lora_rank: int) -> int:
    """Numbers in one adapter."""
    layer = sum(
        lora_rank * max(1, experts) * (fan_in + fan_out)
        for _, fan_in, fan_out, experts in adapted_weights(config)
    )
    return layer * int(config["num_hidden_layers"])


def prepare(wishes: Wishes, folder: Path) -> Workload:
    """Write what is not there yet. A folder made for other wishes is refused: ValueError."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[wishes.shape]
    config = cut_layers(shape.config, wishes.layers)
    names = tuple(f"a{i}" for i in range(wishes.adapters))
    mark = folder / "wishes.json"
    if mark.exists():
        there = json.loads(mark.read_text())
        if there != asdict(wishes):
            raise ValueError(f"{folder} was made for {there}")
        return Workload(wishes, folder, config, names)
    write_model(folder / "model", config)
    b_std = shape.cut_b_std(wishes.layers)
    for i, name in enumerate(names):
        seed = FIRST_ADAPTER_SEED + 1000 * wishes.seed + i
        write_adapter(folder / name, config, wishes.lora_rank, seed, device, b_std)
    # On a CPU adapters are kept in fp32. A quarter more than their bytes, for gaps between them.
    itemsize = 2 if device == "cuda" else 4
    stored = wishes.adapters * adapter_values(config, wishes.lora_rank) * itemsize
    fields = {
        "max_num_seqs": wishes.max_clients,
        "max_model_len": wishes.tokens_in + wishes.tokens_out + 16,
        "max_lora_rank": wishes.lora_rank,
        "max_loras": max(1, wishes.adapters),
        "prefix_cache": False,
        "lora_bytes": stored * 5 // 4 + (64 << 20),
        "host_cache_dir": str(folder / "host"),
        "host_cache_bytes": 3 * stored + (256 << 20),
        **json.loads(wishes.engine),
    }
    (folder / "run.json").write_text(json.dumps(fields))
    mark.write_text(json.dumps(asdict(wishes)))
    return Workload(wishes, folder, config, names)


def as_line(command: list[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)
