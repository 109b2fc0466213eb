"""`OPS`: every kernel by name, one line a kernel file. Tests and benchmarks run over it.

Not for serving: layers import the file of the kernel that they call.
"""

from kernels import (
    dense_lora,
    fused_moe,
    fused_moe_lora,
    gated_act,
    lora_gated_act,
    mla_attention,
    mla_kv,
    mla_lora,
    moe_gate,
    moe_gate_groups,
    moe_route,
    mxfp4,
    norm,
    paged_attention,
    rope_kv,
    sample_token,
    skinny_linear,
    worklist,
)
from kernels.op import Op

OPS: dict[str, Op] = {
    **{op.name: op for op in dense_lora.OPS},
    **{op.name: op for op in fused_moe.OPS},
    **{op.name: op for op in fused_moe_lora.OPS},
    **{op.name: op for op in gated_act.OPS},
    **{op.name: op for op in lora_gated_act.OPS},
    **{op.name: op for op in mla_attention.OPS},
    **{op.name: op for op in mla_kv.OPS},
    **{op.name: op for op in mla_lora.OPS},
    **{op.name: op for op in moe_gate.OPS},
    **{op.name: op for op in moe_gate_groups.OPS},
    **{op.name: op for op in moe_route.OPS},
    **{op.name: op for op in mxfp4.OPS},
    **{op.name: op for op in norm.OPS},
    **{op.name: op for op in paged_attention.OPS},
    **{op.name: op for op in rope_kv.OPS},
    **{op.name: op for op in sample_token.OPS},
    **{op.name: op for op in skinny_linear.OPS},
    **{op.name: op for op in worklist.OPS},
}
