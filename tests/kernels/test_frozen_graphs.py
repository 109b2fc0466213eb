"""A captured graph serves whatever adapters come: its grids hold for all of them, not for those of
the batch that it was captured with (the eighth of the mistakes in test_mistakes.py).

Not here: graphs of whole steps (tests/model_runner/test_at_speed.py).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import fused_moe_lora, lora_decode, lora_gated_act
from kernels.worklist import build_worklist
from tests.kernels.mutant import mutant
from tests.kernels.test_fused_moe_lora import RANKS, E, batch, tables_of
from tests.kernels.test_lora_decode import SMALL

OWN = {
    "activation": lora_gated_act, "decode": lora_decode, "four_operations": fused_moe_lora,
}  # fmt: skip
SHRINK = ("lora_decode", "_shrink_kernel[(num_rows * splits, num_targets)]",
          "_shrink_kernel[(1 * splits, num_targets)]")  # fmt: skip
FROZEN = {  # path: (file, line, what the captured batch needed)
    "activation": SHRINK,
    "decode": SHRINK,
    "four_operations": ("fused_moe_lora", "_expand_kernel[(num_segments * ",
                        "_expand_kernel[(1 * "),
}  # fmt: skip


def graphs_follow(module: Any, path: str) -> list[bool]:
    """Captured with one adapter active; is each replay what an eager call gives? First with that
    one, then with all of them and the base."""
    tables, b = tables_of(device="cuda"), batch(10, False, device="cuda")
    b["ids"], b["slots"] = torch.zeros_like(b["ids"][:, :1]), torch.full_like(b["slots"], -1)
    b["slots"][0] = 1
    base = b["y"][:10]

    def call(module: Any) -> Tensor:
        y = base.clone()
        args = (y, b["x"], tables, 0, b["ids"], b["slots"], E)
        if path == "activation":
            return module.lora_gated_act(*args, "silu", tiles=SMALL)
        if path == "decode":
            module.add_pairs(*args, False, None, SMALL)
        else:
            work = build_worklist(b["ids"], b["slots"], E, len(RANKS), 16)
            module.add_lora((y,), b["x"], tables, (0,), work, 1, None, False)
        return y

    call(module)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(module)
    found = []
    for slots, ids in ((b["slots"].clone(), 0), ([-1, 0, 1, 2, 3, 4, 0, 1, 3, 4], 1)):
        b["slots"].copy_(torch.as_tensor(slots))
        b["ids"].copy_(torch.arange(10, device="cuda")[:, None] % (1 + 3 * ids))
        graph.replay()
        want = call(OWN[path])
        found.append(torch.allclose(got, want, rtol=1e-5, atol=1e-5))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("path", FROZEN)
def test_a_captured_graph_serves_whatever_adapters_come(path: str, tmp_path: Path) -> None:
    file, old, new = FROZEN[path]
    assert graphs_follow(OWN[path], path) == [True, True]
    bad = mutant(file, {old: new}, tmp_path)
    if path == "activation":
        bad = mutant("lora_gated_act", {}, tmp_path, on=bad)
    assert graphs_follow(bad, path) == [True, False]
