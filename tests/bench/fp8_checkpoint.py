"""A full-size Qwen3-MoE checkpoint in fp8 blocks, its values from a seed, one file a layer as
published ones are laid out. Written by hand, because the library's writer copies each tensor twice.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_runner.execution.checkpoint import FP8_BLOCK, OTHER_STD, STDS

# Values that weights are cut from, at a random place each: no multiple of any row, so that rows
# differ. Drawing every value would take minutes on a CPU.
POOL = 16_777_213
CODE_STD = 64.0  # of the fp8 values before their scale
WRITERS = 4
Entry = tuple[str, str, tuple[int, ...], list[Tensor]]  # name, dtype, shape, pieces as bytes


class _Values:
    """Random values of this checkpoint. Not for several threads."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        normal = torch.empty(POOL).normal_(0, 1, generator=self._random)
        self._codes = (normal * CODE_STD).to(torch.float8_e4m3fn).view(torch.uint8)  # [POOL]
        self._normal = normal.bfloat16()  # [POOL]

    def blocks(self, name: str, rows: int, cols: int) -> Iterator[Entry]:
        """A linear in blocks, and their scales."""
        yield name, "F8_E4M3", (rows, cols), self._cut(self._codes, rows * cols)
        shape = tuple(-(-size // FP8_BLOCK) for size in (rows, cols))
        scales = torch.empty(shape).uniform_(0.5, 1.5, generator=self._random)
        scales = (scales * (OTHER_STD / CODE_STD)).bfloat16()
        yield f"{name}_scale_inv", "BF16", shape, [scales.view(-1).view(torch.uint8)]

    def plain(self, name: str, *shape: int) -> Entry:
        """A tensor in bf16; of a norm, ones."""
        std = next((std for end, std in STDS.items() if name.endswith(end)), OTHER_STD)
        if name.endswith("norm.weight"):
            pieces = [torch.ones(shape).bfloat16().view(-1).view(torch.uint8)]
        else:
            scaled = (self._normal * std).view(torch.uint8)
            pieces = self._cut(scaled, 2 * torch.Size(shape).numel(), 2)
        return name, "BF16", shape, pieces

    def _cut(self, pool: Tensor, size: int, step: int = 1) -> list[Tensor]:
        """`size` bytes of the pool from a random value on, and round again."""
        start = step * int(torch.randint(len(pool) // step, (), generator=self._random))
        pieces = []
        while size:
            piece = pool[start : start + size]
            pieces.append(piece)
            size, start = size - len(piece), 0
        return pieces


def write_fp8_qwen3(folder: Path, config: dict[str, Any], seed: int) -> None:
    """config.json, the shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    values = _Values(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    rest = [
        values.plain("model.embed_tokens.weight", vocab, hidden),
        values.plain("model.norm.weight", hidden),
        values.plain("lm_head.weight", vocab, hidden),
    ]
    file_of: dict[str, str] = {}
    with ThreadPoolExecutor(WRITERS) as pool:
        running = []
        for number in range(config["num_hidden_layers"] + 1):
            entries = rest
            if number:
                entries = list(_layer(config, values, number - 1))
            file = f"model-{number:05}.safetensors"
            file_of |= {name: file for name, *_ in entries}
            running.append(pool.submit(_write, folder / file, entries))
        for future in running:
            future.result()
    index = {"weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _layer(config: dict[str, Any], values: _Values, n: int) -> Iterator[Entry]:
    hidden, dim, inner = (config[k] for k in ("hidden_size", "head_dim", "moe_intermediate_size"))
    q, kv = (config[k] * dim for k in ("num_attention_heads", "num_key_value_heads"))
    p = f"model.layers.{n}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield values.plain(f"{p}{name}.weight", hidden)
    for name in ("q_norm", "k_norm"):
        yield values.plain(f"{p}self_attn.{name}.weight", dim)
    for name, rows, cols in (
        ("q_proj", q, hidden),
        ("k_proj", kv, hidden),
        ("v_proj", kv, hidden),
        ("o_proj", hidden, q),
    ):
        yield from values.blocks(f"{p}self_attn.{name}.weight", rows, cols)
    yield values.plain(f"{p}mlp.gate.weight", config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        at = f"{p}mlp.experts.{expert}."
        yield from values.blocks(f"{at}gate_proj.weight", inner, hidden)
        yield from values.blocks(f"{at}up_proj.weight", inner, hidden)
        yield from values.blocks(f"{at}down_proj.weight", hidden, inner)


def _write(path: Path, entries: list[Entry]) -> None:
    """One safetensors file: the length of its header, the header, the tensors in its order."""
    header, at = {}, 0
    for name, dtype, shape, pieces in entries:
        size = sum(len(piece) for piece in pieces)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for *_, pieces in entries:
            for piece in pieces:
                file.write(piece.numpy().data)
