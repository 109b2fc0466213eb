"""From an `EngineConfig` to the parts of an engine: model, KV pages, adapter memory, store,
scheduler.

Built in the order in which they take memory: weights, then adapters, then what is left for pages.
Not here: running them.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from adapter_store.arena import AdapterArena
from adapter_store.host_cache import HostCache
from adapter_store.packed_layout import ALIGN_BYTES
from adapter_store.sources.source import S3Options
from adapter_store.store import AdapterStore
from adapter_store.weights import LoraTarget, assuming
from kernels.lora_tables import LoraTables
from kernels.op import references_only
from kernels.tiling import check_start, gpu_name
from model_runner.config import EngineConfig
from model_runner.execution.checkpoint import RandomReader, SafetensorsReader
from model_runner.execution.kv_cache import KvLayout, allocate_kv, page_bytes, plan_kv
from model_runner.execution.runner import ModelRunner
from model_runner.models.base import ModelConfig, ModelUnsupported, read_json
from model_runner.models.decoder import Decoder
from model_runner.models.registry import Family, find_family
from model_runner.scheduling.page_pool import PagePool
from model_runner.scheduling.scheduler import Scheduler

CPU_KV_BYTES, CPU_ARENA_BYTES, GPU_ARENA_BYTES = 256 << 20, 64 << 20, 8 << 30
GPU_RESERVE = 0.10  # of the GPU's memory, kept for activations and graphs
_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


@dataclass(frozen=True)
class Parts:
    """What an engine is made of.

    max_len  prompt and output together, in tokens;  targets  what adapters may change, the arena's
    """

    device: torch.device
    dtype: torch.dtype
    max_len: int
    targets: tuple[LoraTarget, ...]
    model_config: ModelConfig
    model: Decoder
    arena: AdapterArena
    host_cache: HostCache
    store: AdapterStore
    pool: PagePool
    runner: ModelRunner
    scheduler: Scheduler


def assemble(config: EngineConfig, s3: S3Options | None) -> Parts:
    """Load the model and build everything around it.

    Errors: ValueError (config, model), CheckpointError, and what the device raises.
    """
    device = _find_device(config.device)
    check_start(gpu_name(device), config.max_lora_rank)
    on_cpu = device.type == "cpu"
    family, model_config = read_model_config(Path(config.model))
    dtype, weight_dtype = choose_dtypes(config, model_config, on_cpu)
    if model_config.dtype == "float16" and weight_dtype is torch.bfloat16:
        _log.warning("%s holds float16 and is served in bfloat16: 3 bits less", config.model)
    layout = plan_kv(model_config)
    size = page_bytes(model_config, layout, config.page_tokens, dtype)
    max_len = config.max_model_len or _most_tokens(config, layout, size, device)
    if max_len > model_config.max_positions:
        if config.max_model_len:
            _log.warning(
                "max_model_len is %d, and the model has %d positions: no sequence gets longer",
                max_len,
                model_config.max_positions,
            )
        max_len = model_config.max_positions
    with torch.inference_mode():
        model = family(model_config, _open_reader(config, device, weight_dtype), max_len)
    targets = assuming(model.lora_targets, config.assume_transformers)
    arena = AdapterArena(
        targets,
        max(1, config.max_loras),
        arena_bytes(config, on_cpu),
        weight_dtype,
        device,
        config.max_lora_rank,
        watched=model.seldom_targets,
    )
    cache_dir = Path(config.host_cache_dir) if config.host_cache_dir else None
    host_cache = HostCache(cache_dir, config.host_cache_bytes)
    store = AdapterStore(
        targets,
        arena,
        host_cache,
        load_threads=config.adapter_load_threads,
        s3=s3,
        base_folder=Path(config.model),
    )
    num_pages = _count_pages(config.kv_bytes, size, device)
    caches = allocate_kv(model_config, layout, num_pages, config.page_tokens, dtype, device)
    pool = PagePool(num_pages, config.page_tokens, layout.groups, config.prefix_cache)
    if not config.max_model_len:
        max_len = pool.longest(config.max_step_tokens, max_len)
    runner = ModelRunner(
        model,
        layout,
        caches,
        _view_tables(arena) if config.max_loras else None,
        device=device,
        page_tokens=config.page_tokens,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_len=max_len,
        use_graphs=config.cuda_graphs and not on_cpu and not references_only(),
        deterministic=config.deterministic,
        seldom_slots=arena.watched_slots,
    )
    scheduler = Scheduler(
        config.max_num_seqs,
        config.max_step_tokens,
        max_len,
        pool,
        store,
        model_config.eos_ids,
        lacks_slot=store.lacks_slot,
    )
    return Parts(
        device,
        dtype,
        max_len,
        targets,
        model_config,
        model,
        arena,
        host_cache,
        store,
        pool,
        runner,
        scheduler,
    )


def read_model_config(folder: Path) -> tuple[Family, ModelConfig]:
    """The family of a checkpoint folder and its configuration. Errors: ModelUnsupported."""
    raw = read_json(folder / "config.json")
    family = find_family(list(raw.get("architectures") or ()))
    try:
        return family, family.read_config(raw, folder)
    except KeyError as error:
        raise ModelUnsupported(f"{folder}/config.json: {error} is missing") from None


def choose_dtypes(
    config: EngineConfig, model_config: ModelConfig, on_cpu: bool
) -> tuple[torch.dtype, torch.dtype]:
    """What is computed in, and what the model's and the adapters' weights are kept in."""
    dtype = DTYPES[config.dtype or ("float32" if on_cpu else model_config.dtype)]
    return dtype, DTYPES[config.weight_dtype] if config.weight_dtype else dtype


def arena_bytes(config: EngineConfig, on_cpu: bool) -> int:
    """Size of the adapter memory, as the arena rounds it."""
    wanted = config.lora_bytes or (CPU_ARENA_BYTES if on_cpu else GPU_ARENA_BYTES)
    return wanted // ALIGN_BYTES * ALIGN_BYTES


def _find_device(name: str) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _open_reader(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> SafetensorsReader | RandomReader:
    kind, _, seed = config.load_format.partition(":")
    if kind == "random":
        return RandomReader(int(seed), device, dtype)
    return SafetensorsReader(Path(config.model), device, dtype)


def _view_tables(a: AdapterArena) -> LoraTables:
    """The arena as kernels see it."""
    return LoraTables(a.memory, a.a_off, a.b_off, a.a_stride, a.b_stride, a.lora_rank, a.max_rank)


def _most_tokens(
    config: EngineConfig, layout: KvLayout, bytes_per_page: int, device: torch.device
) -> int:
    """Tokens of one sequence that the device could hold if it held nothing else: tables by position
    are made with the model, before the pages are counted, and a model may allow ten million."""
    if all(group.window for group in layout.groups):
        return sys.maxsize
    budget = config.kv_bytes or CPU_KV_BYTES
    if device.type == "cuda" and not config.kv_bytes:
        budget = torch.cuda.get_device_properties(device).total_memory
    return budget // bytes_per_page * config.page_tokens


def _count_pages(kv_bytes: int, bytes_per_page: int, device: torch.device) -> int:
    """Pages that the budget holds; 0 bytes = what the GPU has left, or a CPU's default."""
    budget = kv_bytes or CPU_KV_BYTES
    if device.type == "cuda" and not kv_bytes:
        free, total = torch.cuda.mem_get_info(device)
        budget = free - int(GPU_RESERVE * total)
    if budget < 2 * bytes_per_page:
        raise ValueError(
            f"{budget} bytes of KV memory hold less than 2 pages of {bytes_per_page} bytes"
        )
    return budget // bytes_per_page
