"""Size the context and the KV cache for the memory of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from localgen.backends.cuda.device.options import CACHE_DTYPE_NAMES, CudaOptions
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_shape import (
    kv_cache_bytes_per_token,
    shape_from_spec,
)
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.compute_buffers import cuda_graph_pool_bytes, cuda_work_bytes
from localgen.backends.memory.kv_sizing import KVSize, KVSizeRequest
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.types import MAX_DRAFT_TOKENS
from localgen.backends.units import format_size

# if allocation fails, the KV cache is shrunk by this factor, up to this many attempts
_SHRINK_FACTOR, _MAX_ATTEMPTS = 0.9, 4


def kv_bytes_per_token(spec: ModelSpec, cache_dtype: torch.dtype) -> int:
    """KV cache bytes per token, over all layers."""
    kind = CACHE_DTYPE_NAMES[cache_dtype]
    return int(kv_cache_bytes_per_token(shape_from_spec(spec).layer_caches, kind, kind))


def step_work_bytes(spec: ModelSpec, options: CudaOptions, dtype: torch.dtype) -> int:
    """Estimated working memory of the largest step, in addition to weights and KV cache."""
    return cuda_work_bytes(
        shape_from_spec(spec),
        max_batch_tokens=options.max_batch_tokens,
        num_seqs=options.parallel,
        max_drafts=MAX_DRAFT_TOKENS,
        element_bytes=dtype.itemsize,
        on_gpu=options.device != "cpu",
    )


def graph_pool_bytes(spec: ModelSpec, options: CudaOptions, dtype: torch.dtype) -> int:
    """The part of step_work_bytes that CUDA graphs share."""
    shape = shape_from_spec(spec)
    return cuda_graph_pool_bytes(shape, num_seqs=options.parallel, element_bytes=dtype.itemsize)


def device_free_bytes(device: torch.device, limit_bytes: int | None) -> int:
    """Free memory of the device in bytes. limit_bytes: upper limit on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_memory_bytes()
    return available if limit_bytes is None else min(available, limit_bytes)


def choose_cuda_kv_size(
    spec: ModelSpec, options: CudaOptions, *, free_bytes: int, draft_token_bytes: int = 0
) -> KVSize:
    """Return the requested context length and KV cache size, or the largest that fit.

    free_bytes: memory left after weights and working memory.
    draft_token_bytes: bytes per token of the draft model's KV cache, which has the same size.

    Raises InvalidRequest or OutOfMemory; the messages state both numbers.
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
    """Choose and allocate the KV cache; retry with a smaller one if the allocation fails.

    allocate: allocates a size; returns False if it does not fit.

    Raises InvalidRequest or OutOfMemory.
    """
    for _ in range(_MAX_ATTEMPTS):
        size = choose_cuda_kv_size(
            spec, options, free_bytes=free_bytes, draft_token_bytes=draft_token_bytes
        )
        if allocate(size):
            return size
        free_bytes = int(free_bytes * _SHRINK_FACTOR)
    raise OutOfMemory(
        f"a KV cache of {size.kv_tokens:,} tokens does not fit on {options.device}, although "
        f"{format_size(free_bytes)} seemed free: use a smaller --kv-tokens"
    )
