"""The memory of keys and values, and how many pages of it fit.

All KV groups share one id space of pages: the i-th layer of each group uses the i-th tensor, and a
page belongs to one group at a
time. So one byte budget serves full and window layers alike, and nothing is split beforehand.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.models.base import ModelConfig
from model_runner.scheduling.page_pool import KvGroup


@dataclass(frozen=True)
class KvLayout:
    """Which group each layer belongs to, and its place in it.

    groups  one for each distinct window;  group_of_layer [N];  tensor_of_layer [N]: index among the
            layers of its group
    """

    groups: tuple[KvGroup, ...]
    group_of_layer: tuple[int, ...]
    tensor_of_layer: tuple[int, ...]

    @property
    def num_tensors(self) -> int:
        return max(self.tensor_of_layer) + 1


def plan_kv(config: ModelConfig) -> KvLayout:
    """The KV groups of a model, full attention first."""
    windows = sorted(set(config.windows))
    kind = "chunks" if config.chunked else "window"
    groups = tuple(
        KvGroup(f"{kind}{w}", w, config.chunked) if w else KvGroup("full") for w in windows
    )
    counts, tensors = [0] * len(windows), []
    group_of_layer = tuple(windows.index(w) for w in config.windows)
    for group in group_of_layer:
        tensors.append(counts[group])
        counts[group] += 1
    return KvLayout(groups, group_of_layer, tuple(tensors))


def page_bytes(config: ModelConfig, layout: KvLayout, page_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all tensors, keys and values."""
    return layout.num_tensors * page_tokens * config.kv_values * dtype.itemsize


def allocate_kv(
    config: ModelConfig,
    layout: KvLayout,
    num_pages: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """The caches by layer: (k, v), each [P, C, G, D]; of latent attention the latents
    [P, C, R + Dr] twice. Layers of different groups share tensors.

    Zeroed: a page that nobody wrote yet may be read under a mask, and must not hold NaN by
    accident.
    """
    if config.latent is not None:
        size = (num_pages, page_tokens, config.kv_values)
        latents = [torch.zeros(size, dtype=dtype, device=device) for _ in range(layout.num_tensors)]
        return tuple((latents[i], latents[i]) for i in layout.tensor_of_layer)
    shape = (num_pages, page_tokens, config.num_kv_heads, config.head_dim)
    tensors = [
        (
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(layout.num_tensors)
    ]
    return tuple(tensors[i] for i in layout.tensor_of_layer)
