"""Which prefixes of a model are kept in RAM and on disk, and under which key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.formats.hf.safetensors import weight_files
from localgen.backends.formats.model_files import shards_of
from localgen.backends.kv_store.blocks import namespace_of
from localgen.backends.kv_store.fingerprint import (
    contents_fingerprint,
    engine_namespace,
    files_fingerprint,
)
from localgen.backends.kv_store.opening import open_prefix_store, resolve_tier_sizes
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.model_info import ModelLoadRequest


def resolve_kv_tiers(options: CudaOptions, request: ModelLoadRequest) -> tuple[CudaOptions, str]:
    """Resolve kv_ram and kv_disk; see resolve_tier_sizes."""
    reason = ""
    if not options.prefix_cache:
        reason = "the prefix cache is switched off (--no-prefix-cache)"
    elif options.tp > 1:
        reason = "the KV cache is divided among several GPUs (--tp)"
    ram, disk, note = resolve_tier_sizes(request, reason)
    return replace(options, kv_ram=ram, kv_disk=disk), note


def open_cuda_prefix_store(
    source: ModelSource,
    options: CudaOptions,
    request: ModelLoadRequest,
    dtype: torch.dtype,
    ctx: int,
) -> tuple[PrefixStore | None, str]:
    """Open the store of a model; see open_prefix_store.

    dtype: compute type of the model. ctx: context length.
    """
    if not (options.kv_ram or options.kv_disk):
        return None, ""
    path = source.path
    files = shards_of(path)
    if path.is_dir():
        files = (path / "config.json", *(() if options.dummy else weight_files(path)))
    # of these depend how keys and values are computed, and the bytes of a page
    cuda = Path(__file__).parent
    sources = contents_fingerprint(cuda, cuda.parent / "formats", pattern="*.py")
    namespace = engine_namespace(
        files_fingerprint(files),
        namespace_of(("cuda", torch.__version__, sources)),
        (
            str(dtype),
            str(options.cache_dtype),
            torch.device(options.device).type,
            PAGE_TOKENS,
            *_rotations(source, ctx),
            str(options.dummy),
        ),
    )
    return open_prefix_store(
        request,
        namespace,
        ram_bytes=options.kv_ram,
        disk_bytes=options.kv_disk,
        about={
            "build": f"cuda, torch {torch.__version__}",
            "cache_type_k": options.cache_type_k,
            "cache_type_v": options.cache_type_v,
        },
    )


def _rotations(source: ModelSource, ctx: int) -> Iterator[bytes]:
    """What the rotation of keys depends on: with LongRoPE, on the context length too."""
    for index in range(source.spec.num_layers):
        rope = source.spec.layer_rope(index)
        yield b"" if rope is None else rope.inv_freq(ctx).numpy().tobytes()
