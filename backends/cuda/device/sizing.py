"""How large a context and a pool fit beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from localgen.backends.cuda.device.options import CACHE_DTYPE_NAMES, CudaOptions
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_shape import (
    LayerCacheShape,
    ModelShape,
    kv_cache_bytes_per_token,
)
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.compute_buffers import cuda_work_bytes
from localgen.backends.memory.kv_sizing import KVSize, KVSizeRequest
from localgen.backends.memory.system import available_memory_bytes

# a pool that turns out too large is made this much smaller, so often
_SHRINK_FACTOR, _MAX_ATTEMPTS = 0.9, 4


def shape_from_spec(spec: ModelSpec) -> ModelShape:
    """The figures that a model's memory follows from."""
    moe = spec.moe
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        active_intermediate_size=moe.intermediate_size * moe.top_k
        if moe
        else spec.intermediate_size,
        num_heads=spec.num_heads,
        vocab_size=spec.vocab_size,
        ctx_train=spec.max_len,
        layer_caches=tuple(
            LayerCacheShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, window)
            for window in spec.sliding_windows
        ),
        num_experts=moe.num_experts if moe else 0,
        num_active_experts=moe.top_k if moe else 0,
    )


def kv_bytes_per_token(spec: ModelSpec, cache_dtype: torch.dtype) -> int:
    """Bytes of one token in the cache, over all layers."""
    kind = CACHE_DTYPE_NAMES[cache_dtype]
    return int(kv_cache_bytes_per_token(shape_from_spec(spec).layer_caches, kind, kind))


def step_work_bytes(spec: ModelSpec, options: CudaOptions, dtype: torch.dtype) -> int:
    """Bytes that a step of the largest size needs beside weights and cache, about."""
    return cuda_work_bytes(
        shape_from_spec(spec),
        max_batch_tokens=options.max_batch_tokens,
        num_seqs=options.parallel,
        element_bytes=dtype.itemsize,
    )


def device_free_bytes(device: torch.device, limit_bytes: int | None) -> int:
    """Memory of the device that nobody uses. limit_bytes: what there is for this model on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_memory_bytes()
    return available if limit_bytes is None else min(available, limit_bytes)


def choose_cuda_kv_size(
    spec: ModelSpec, options: CudaOptions, *, free_bytes: int, draft_token_bytes: int = 0
) -> KVSize:
    """The context and pool asked for, or the largest that fit.

    free_bytes: bytes left beside weights and working memory. draft_token_bytes: of a token in a
    draft model's pool, which is as large. InvalidRequest, OutOfMemory: with both numbers.
    """
    on_cpu = options.device == "cpu"
    rules = (
        kv_sizing.CUDA_ON_CPU_POOL
        if on_cpu
        else replace(kv_sizing.CUDA_POOL, memory_location=f" on {options.device}")
    )
    wanted = KVSizeRequest(ctx=options.ctx, kv_tokens=options.kv_tokens, ctx_train=spec.max_len)
    per_token = kv_bytes_per_token(spec, options.cache_dtype) + draft_token_bytes
    return kv_sizing.resolve_kv_size(wanted, rules, token_bytes=per_token, free_bytes=free_bytes)


def fit_kv_cache(
    spec: ModelSpec,
    options: CudaOptions,
    *,
    free_bytes: int,
    allocate: Callable[[KVSize], bool],
    draft_token_bytes: int = 0,
) -> KVSize:
    """The size of `choose_cuda_kv_size`, allocated; smaller where the driver's books turn out too
    good.

    allocate: says whether there was room. InvalidRequest, OutOfMemory.
    """
    for _ in range(_MAX_ATTEMPTS):
        size = choose_cuda_kv_size(
            spec, options, free_bytes=free_bytes, draft_token_bytes=draft_token_bytes
        )
        if allocate(size):
            return size
        free_bytes = int(free_bytes * _SHRINK_FACTOR)
    raise OutOfMemory(
        f"a KV pool of {size.kv_tokens:,} tokens does not fit on {options.device}, though "
        f"{free_bytes / 1e9:.1f} GB seemed free: ask for a smaller --kv-tokens"
    )
