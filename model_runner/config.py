"""`EngineConfig`: every setting of one engine. Frozen, plain values, no torch; checked once, at the
door."""

from dataclasses import dataclass

# Kernels count a step's tokens along the second or third side of a grid, which goes so far.
MAX_STEP_TOKENS = (1 << 16) - 1


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    model            folder in Hugging Face format (config.json, safetensors)
    load_format      "safetensors", or "random:SEED": weights filled in place, no file but
                     config.json is read
    device           "cpu", "cuda", "cuda:0", "" = a GPU if there is one
    dtype            "bfloat16", "float32", "" = the checkpoint's on a GPU, float32 on a CPU
    weight_dtype     what the model's and the adapters' weights are kept in, "" = dtype. Another one
                     is for the reference kernels alone, which widen weights at each use
    max_num_seqs     sequences in one step, at most;  max_step_tokens  tokens in one step (a longer
                     prompt is chunked)
    max_model_len    prompt and output together; 0 = what the model allows and memory holds
    page_tokens      tokens per KV page (C);  kv_bytes  budget for all KV pages, 0 = what is left on
                     the GPU, 256 MiB on a CPU
    prefix_cache     reuse the pages of a common prefix (same salt, same adapter)
    max_loras        slots (L): adapters resident at once;  lora_bytes  the arena, 0 = 64 MiB on a
                     CPU, 8 GiB on a GPU; one adapter may take half of it
    max_lora_rank    the largest rank that is accepted; ranks count in eights, so 1 to 8 mean 8
    assume_transformers  4 or 5: the release beside which adapters are trained, for the few files
                     whose expert tensors' sizes do not tell their layout (a square down_proj alone,
                     as gpt-oss has it); 0 = not known: read as 5, with a warning
    host_cache_dir   folder of packed adapters ("" = a private one in /dev/shm);  host_cache_bytes
                     its budget
    adapter_load_threads  adapters fetched side by side
    cuda_graphs      whole-step graphs, by padded batch size
    look_ahead       launch step n+1 before the tokens of step n are read; None = on a GPU
    deterministic    bit-equal results for equal batches (no split-K with atomics)
    seed             where seeds of requests without one come from; None = from the operating system
    """

    model: str
    load_format: str = "safetensors"
    device: str = ""
    dtype: str = ""
    weight_dtype: str = ""
    max_num_seqs: int = 32
    max_step_tokens: int = 2048
    max_model_len: int = 0
    page_tokens: int = 16
    kv_bytes: int = 0
    prefix_cache: bool = True
    max_loras: int = 8
    lora_bytes: int = 0
    max_lora_rank: int = 64
    assume_transformers: int = 0
    host_cache_dir: str = ""
    host_cache_bytes: int = 4 << 30
    adapter_load_threads: int = 4
    cuda_graphs: bool = True
    look_ahead: bool | None = None
    deterministic: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_step_tokens",
            "page_tokens",
            "adapter_load_threads",
            "max_lora_rank",
        ):
            _require(
                getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}"
            )
        for name in ("max_model_len", "kv_bytes", "max_loras", "lora_bytes", "host_cache_bytes"):
            _require(
                getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name)}"
            )
        _require(
            self.max_step_tokens <= MAX_STEP_TOKENS,
            f"max_step_tokens must be at most {MAX_STEP_TOKENS}, not {self.max_step_tokens}",
        )
        _require(
            self.max_step_tokens >= self.max_num_seqs,
            "max_step_tokens must be at least max_num_seqs",
        )
        for name in ("dtype", "weight_dtype"):
            _require(
                getattr(self, name) in ("", "bfloat16", "float32"),
                f"{name} must be bfloat16 or float32, not {getattr(self, name)!r}",
            )
        _require(
            self.assume_transformers in (0, 4, 5),
            f"assume_transformers must be 0, 4 or 5, not {self.assume_transformers}",
        )
        kind, _, seed = self.load_format.partition(":")
        _require(
            self.load_format == "safetensors" or (kind == "random" and seed.isdigit()),
            f"load_format must be safetensors or random:SEED, not {self.load_format!r}",
        )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
