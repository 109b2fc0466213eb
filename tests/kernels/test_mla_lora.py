"""LoRA on an absorbed kv_b_proj: what parity with the reference does not ask."""

import pytest
import torch

from kernels.fused_moe_lora import random_tables
from kernels.mla_lora import (
    mla_query_lora,
    mla_query_lora_reference,
    mla_value_lora,
    mla_value_lora_reference,
)

HEADS, DIM, LATENT, RANK = 3, 16, 136, 72


@pytest.mark.interp
@pytest.mark.parametrize("value", [False, True])
def test_a_large_rank_is_rounded_no_more_often_than_a_small_one(value: bool) -> None:
    """In fp16, as the interpreter has no bf16: rounded once, an error is half a place at most,
    and what fp32 sums differ by."""
    half, g = torch.float16, torch.Generator().manual_seed(0)
    tables = random_tables([(1, LATENT, HEADS * 2 * DIM)], [RANK], RANK, "cpu", half, 0)
    slots = torch.zeros(4, dtype=torch.int32)
    wide = torch.randn(4, HEADS, LATENT, generator=g).to(half)
    narrow = torch.randn(4, HEADS, DIM, generator=g).to(half)
    y, x = (narrow, wide) if value else (wide, narrow)
    run, reference = (
        (mla_value_lora, mla_value_lora_reference)
        if value
        else (mla_query_lora, mla_query_lora_reference)
    )
    truth = y.float()
    reference(truth, x.float(), tables, 0, slots, DIM)
    run(y, x, tables, 0, slots, DIM)
    above = torch.nextafter(truth.abs().to(half), torch.tensor(torch.inf, dtype=half))
    place = above.float() - truth.abs().to(half).float()
    assert ((y.float() - truth).abs() <= 0.5 * place + 5e-6).all()
