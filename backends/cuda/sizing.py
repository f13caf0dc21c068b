"""How large a context and a pool fit beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from localgen.backends.cuda.kernels.kv import LARGEST
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.pages import PAGE_TOKENS, pages_for
from localgen.backends.cuda.spec import ModelSpec
from localgen.backends.errors import InvalidRequest, OutOfMemory

# share of the free memory that a pool takes by default: a GPU is there to be filled, a CPU's
# memory belongs to other programs, too
GPU_KV_SHARE = 0.9
CPU_KV_SHARE = 0.5
# on a CPU, models with a short context get a pool for several sessions
CPU_POOL_TOKENS = 16_384
_SCALE_BYTES = 4
# a pool that turns out too large is made this much smaller, so often
_SMALLER, _TRIES = 0.9, 4


@dataclass(frozen=True, slots=True)
class Size:
    """ctx: longest sequence, in tokens. num_pages: the pool."""

    ctx: int
    num_pages: int
    notes: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS


def kv_bytes_per_token(spec: ModelSpec, cache: torch.dtype) -> int:
    """Bytes of one token in the cache, over all layers."""
    head = spec.head_dim * cache.itemsize + (_SCALE_BYTES if cache in LARGEST else 0)
    return 2 * spec.layers * spec.kv_heads * head


def work_bytes(spec: ModelSpec, options: Settings, dtype: torch.dtype) -> int:
    """Bytes that a step of the largest size needs beside weights and cache, about."""
    moe = spec.moe
    inner = moe.intermediate * moe.top_k if moe else spec.intermediate
    widest = 3 * inner + 4 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    # logits in their own type, in float32, and twice more while they are sampled
    outputs = 2 * options.parallel * spec.vocab * (dtype.itemsize + 3 * 4)
    return options.max_batch_tokens * widest * dtype.itemsize + outputs


def free_bytes(device: torch.device, limit: int | None) -> int:
    """Memory of the device that nobody uses. limit: what there is for this model on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    return available if limit is None else min(available, limit)


def choose(spec: ModelSpec, options: Settings, *, free: int) -> Size:
    """The context and pool asked for, or the largest that fit.

    free: bytes left beside weights and working memory. InvalidRequest, OutOfMemory: with both
    numbers.
    """
    trained = spec.max_len
    if options.ctx is not None and not 0 < options.ctx <= trained:
        raise InvalidRequest(
            f"--ctx {options.ctx:,}: the model was trained for {trained:,} tokens, "
            f"ask for 1 to {trained:,}",
            param="ctx",
        )
    on_cpu = options.device == "cpu"
    page_bytes = PAGE_TOKENS * kv_bytes_per_token(spec, options.cache_dtype)
    fitting = int(max(0, free) * (CPU_KV_SHARE if on_cpu else GPU_KV_SHARE) / page_bytes)
    asked = None if options.kv_tokens is None else pages_for(options.kv_tokens)
    ctx = options.ctx or max(1, min(trained, PAGE_TOKENS * (fitting if asked is None else asked)))
    pages = asked if asked is not None else max(pages_for(ctx), _default_pages(fitting, on_cpu))
    if pages < pages_for(ctx):
        raise InvalidRequest(
            f"a pool of {options.kv_tokens:,} tokens is smaller than the context of {ctx:,}: "
            f"ask for at least --kv-tokens {ctx:,}, or a smaller --ctx",
            param="kv_tokens",
        )
    if pages * page_bytes > free:
        raise OutOfMemory(
            f"a KV pool of {pages * PAGE_TOKENS:,} tokens needs {pages * page_bytes / 1e9:.1f} GB, "
            f"{max(0, free) / 1e9:.1f} GB are free on {options.device} beside the weights: "
            f"ask for at most --ctx {max(0, free) // page_bytes * PAGE_TOKENS:,}, or -ctk int8 "
            "-ctv int8"
        )
    notes: tuple[str, ...] = ()
    if options.ctx is None and options.kv_tokens is None and ctx < trained:
        notes = (f"context {ctx:,} of {trained:,}: what fits on {options.device}",)
    return Size(ctx, pages, notes)


def fit(spec: ModelSpec, options: Settings, *, free: int, allocate: Callable[[Size], bool]) -> Size:
    """The size of `choose`, allocated; smaller where the driver's books turn out too good.

    allocate: says whether there was room. InvalidRequest, OutOfMemory.
    """
    for _ in range(_TRIES):
        size = choose(spec, options, free=free)
        if allocate(size):
            return size
        free = int(free * _SMALLER)
    raise OutOfMemory(
        f"a KV pool of {size.kv_tokens:,} tokens does not fit on {options.device}, though "
        f"{free / 1e9:.1f} GB seemed free: ask for a smaller --kv-tokens"
    )


def _default_pages(fitting: int, on_cpu: bool) -> int:
    return min(fitting, pages_for(CPU_POOL_TOKENS)) if on_cpu else fitting
