"""How large a context and a pool fit beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from localgen.backends.cuda.device.options import CACHE_NAMES, Settings
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_shape import LayerCache, ModelShape, token_bytes
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.compute_buffers import cuda_work_bytes
from localgen.backends.memory.kv_sizing import Size, Wanted
from localgen.backends.memory.system import available_bytes

# a pool that turns out too large is made this much smaller, so often
_SMALLER, _TRIES = 0.9, 4


def shape_of(spec: ModelSpec) -> ModelShape:
    """The figures that a model's memory follows from."""
    moe = spec.moe
    return ModelShape(
        layers=spec.layers,
        hidden=spec.hidden,
        inner=moe.intermediate * moe.top_k if moe else spec.intermediate,
        heads=spec.heads,
        vocab=spec.vocab,
        ctx_train=spec.max_len,
        caches=tuple(
            LayerCache(spec.kv_heads, spec.head_dim, spec.head_dim, window)
            for window in spec.windows
        ),
        experts=moe.experts if moe else 0,
        experts_used=moe.top_k if moe else 0,
    )


def kv_bytes_per_token(spec: ModelSpec, cache: torch.dtype) -> int:
    """Bytes of one token in the cache, over all layers."""
    kind = CACHE_NAMES[cache]
    return int(token_bytes(shape_of(spec).caches, kind, kind))


def work_bytes(spec: ModelSpec, options: Settings, dtype: torch.dtype) -> int:
    """Bytes that a step of the largest size needs beside weights and cache, about."""
    return cuda_work_bytes(
        shape_of(spec),
        step_tokens=options.max_batch_tokens,
        sequences=options.parallel,
        element_bytes=dtype.itemsize,
    )


def free_bytes(device: torch.device, limit: int | None) -> int:
    """Memory of the device that nobody uses. limit: what there is for this model on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_bytes()
    return available if limit is None else min(available, limit)


def choose(spec: ModelSpec, options: Settings, *, free: int, draft_token_bytes: int = 0) -> Size:
    """The context and pool asked for, or the largest that fit.

    free: bytes left beside weights and working memory. draft_token_bytes: of a token in a draft
    model's pool, which is as large. InvalidRequest, OutOfMemory: with both
    numbers.
    """
    on_cpu = options.device == "cpu"
    rules = (
        kv_sizing.CUDA_ON_CPU if on_cpu else replace(kv_sizing.CUDA, place=f" on {options.device}")
    )
    wanted = Wanted(ctx=options.ctx, kv_tokens=options.kv_tokens, trained=spec.max_len)
    per_token = kv_bytes_per_token(spec, options.cache_dtype) + draft_token_bytes
    return kv_sizing.choose(wanted, rules, token_bytes=per_token, free_bytes=free)


def fit(
    spec: ModelSpec,
    options: Settings,
    *,
    free: int,
    allocate: Callable[[Size], bool],
    draft_token_bytes: int = 0,
) -> Size:
    """The size of `choose`, allocated; smaller where the driver's books turn out too good.

    allocate: says whether there was room. InvalidRequest, OutOfMemory.
    """
    for _ in range(_TRIES):
        size = choose(spec, options, free=free, draft_token_bytes=draft_token_bytes)
        if allocate(size):
            return size
        free = int(free * _SMALLER)
    raise OutOfMemory(
        f"a KV pool of {size.kv_tokens:,} tokens does not fit on {options.device}, though "
        f"{free / 1e9:.1f} GB seemed free: ask for a smaller --kv-tokens"
    )
