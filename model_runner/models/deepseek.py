"""DeepSeek V2 and V3: latent attention, the first layers dense, an expert that every token has, and
experts chosen by groups. Checkpoints in fp8 blocks are dequantised as they are read."""

from pathlib import Path
from typing import Any

from kernels.moe_gate_groups import GateRule
from model_runner.layers.mla import LatentAttention
from model_runner.layers.norm import RmsNorm
from model_runner.layers.rope import yarn_mscale
from model_runner.models.base import (
    LatentConfig,
    ModelConfig,
    ModelUnsupported,
    WeightReader,
    read_common,
    require,
)
from model_runner.models.decoder import Decoder
from model_runner.models.qwen3_moe import expert_names


class DeepSeek(Decoder):
    """What V2 and V3 share."""

    names = expert_names(shared="shared_experts")

    def _load_mixer(self, reader: WeightReader, n: int) -> LatentAttention:
        p, c = f"model.layers.{n}.self_attn.", self.config
        latent = c.latent
        assert latent is not None
        width_k, heads = latent.dim_nope + latent.dim_rope, c.num_heads
        kv = ("kv_a_proj_with_mqa", latent.kv_rank + latent.dim_rope)
        q_norm = q_up = None
        query = ("q_proj", heads * width_k)
        if latent.q_rank:
            query = ("q_a_proj", latent.q_rank)
            weight = reader.read(p + "q_a_layernorm.weight", (latent.q_rank,))
            q_norm = RmsNorm(weight, _LATENT_EPS)
            q_up = self._load_linear(
                reader, p, (("q_b_proj", heads * width_k),), latent.q_rank, False
            )
        rows = heads * (latent.dim_nope + latent.dim_v)
        up = reader.read(p + "kv_b_proj.weight", (rows, latent.kv_rank))
        up = up.view(heads, latent.dim_nope + latent.dim_v, latent.kv_rank)  # [Q, Dn + Dv, R]
        key_up, value_up = up.split((latent.dim_nope, latent.dim_v), 1)
        return LatentAttention(
            layer=n,
            num_heads=heads,
            dim_rope=latent.dim_rope,
            q_width=query[1],
            down=self._load_linear(reader, p, (query, kv), c.hidden_size, False),
            q_norm=q_norm,
            q_up=q_up,
            kv_norm=reader.read(p + "kv_a_layernorm.weight", (latent.kv_rank,)),
            key_up=key_up.contiguous(),
            value_up=value_up.contiguous(),
            kv_target=self._index[p + "kv_b_proj"],
            out=self._load_linear(
                reader, p, (("o_proj", c.hidden_size),), heads * latent.dim_v, False
            ),
            rope=self._rope,
            interleaved=latent.interleaved,
            eps=_LATENT_EPS,
            scale=latent.scale,
        )


# What transformers takes for a field that a file leaves out. Null is a value.
_V2_DEFAULTS = {"n_shared_experts": 2, "q_lora_rank": 1536}
_V3_DEFAULTS = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


class DeepSeekV2(DeepSeek):
    """DeepseekV2ForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        raw = _V2_DEFAULTS | raw
        require(raw, "topk_method", "greedy", "group_limited_greedy")
        require(raw, "norm_topk_prob", False)
        require(raw, "scoring_func", "softmax")
        grouped = raw.get("topk_method") == "group_limited_greedy"
        rule = GateRule(
            sigmoid=False,
            num_groups=int(raw.get("n_group") or 1) if grouped else 1,
            top_groups=int(raw.get("topk_group") or 1) if grouped else 1,
            scaling=float(raw.get("routed_scaling_factor") or 1),
        )
        return _read_config(raw, folder, rule, correction=False, interleaved=True)


class DeepSeekV3(DeepSeek):
    """DeepseekV3ForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        raw = _V3_DEFAULTS | raw
        require(raw, "topk_method", "noaux_tc")
        require(raw, "scoring_func", "sigmoid")
        rule = GateRule(
            sigmoid=True,
            num_groups=int(raw.get("n_group") or 1),
            top_groups=int(raw.get("topk_group") or 1),
            group_best=2,
            renormalize=bool(raw.get("norm_topk_prob", True)),
            scaling=float(raw.get("routed_scaling_factor") or 1),
        )
        interleaved = bool(raw.get("rope_interleave", True))
        return _read_config(raw, folder, rule, correction=True, interleaved=interleaved)


# transformers gives these two norms no eps of the config's.
_LATENT_EPS = 1e-6


def _read_config(
    raw: dict[str, Any], folder: Path, rule: GateRule, correction: bool, interleaved: bool
) -> ModelConfig:
    require(raw, "hidden_act", "silu")
    require(raw, "attention_bias", False)
    require(raw, "mlp_bias", False)
    require(raw, "moe_layer_freq", 1)
    try:
        rope, nope = int(raw["qk_rope_head_dim"]), int(raw["qk_nope_head_dim"])
        common = read_common({**raw, "head_dim": rope}, folder)
        latent = LatentConfig(
            q_rank=int(raw.get("q_lora_rank") or 0),
            kv_rank=int(raw["kv_lora_rank"]),
            dim_nope=nope,
            dim_rope=rope,
            dim_v=int(raw["v_head_dim"]),
            scale=(nope + rope) ** -0.5 * yarn_mscale(common["rope"].fields) ** 2,
            interleaved=interleaved,
        )
        experts = int(raw.get("n_routed_experts") or raw["num_local_experts"])
        dense, layers = int(raw.get("first_k_dense_replace") or 0), common["num_layers"]
        inner = int(raw["moe_intermediate_size"])
        return ModelConfig(
            **common,
            windows=(0,) * layers,
            experts_of_layer=tuple(0 if n < dense else experts for n in range(layers)),
            top_k=int(raw["num_experts_per_tok"]),
            expert_intermediate_size=inner,
            shared_intermediate_size=inner * int(raw.get("n_shared_experts") or 0),
            gate_rule=rule,
            gate_correction=correction,
            latent=latent,
        )
    except KeyError as error:
        raise ModelUnsupported(f"{folder}/config.json: {error} is missing") from None
