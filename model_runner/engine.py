"""`Engine`: requests of token ids in, tokens out. Builds the model, the KV pages, the adapter arena and the scheduler, and steps them.

One thread owns an engine and everything in it. No text (text.py), no event loop (engine_loop.py), no Ray.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from adapter_store.arena import AdapterArena
from adapter_store.errors import AdapterError, AdapterInvalid, AdapterNotFound, StoreFull
from adapter_store.host_cache import HostCache
from adapter_store.ref import AdapterRef
from adapter_store.sources.s3_options import S3Options
from adapter_store.store import AdapterStore
from kernels.lora_tables import LoraTables
from kernels.op import count_compiles
from model_runner.config import EngineConfig
from model_runner.execution.checkpoint import RandomReader, SafetensorsReader
from model_runner.execution.kv_cache import allocate_kv, page_bytes, plan_kv
from model_runner.execution.runner import ModelRunner, PendingStep, ScoreSink
from model_runner.execution.sampler import NOT_FINITE, TokenMask
from model_runner.models.base import ModelConfig, read_json
from model_runner.models.registry import find_family
from model_runner.request import Completion, ErrorCode, FinishReason, Request, RequestOutput, TokenLogprobs
from model_runner.scheduling.page_pool import PagePool
from model_runner.scheduling.scheduler import Scheduler, Update
from model_runner.scheduling.sequence import Sequence as Life
from model_runner.stats import EngineStats

CPU_KV_BYTES, CPU_ARENA_BYTES, GPU_ARENA_BYTES = 256 << 20, 64 << 20, 8 << 30
GPU_RESERVE = 0.10  # of the memory that is free after loading, kept for activations and graphs
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


class Engine:
    """One model on one device, serving many adapters.

    submit never raises for a request's sake: what is wrong with a request comes out of step() as its output.
    """
