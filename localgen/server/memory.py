"""Whether another model fits in memory."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from localgen.backends.types import ModelInfo
from localgen.hub.files import ModelFile

# weights as the files have them, 5 % for buffers of the computation, and an allowance for the
# KV cache: an eighth of the weights, at least 64 MiB. The engine sizes its pool by what is free
# then, so the allowance is what it can do with, not what it will take.
WEIGHTS_FACTOR = 1.05
KV_SHARE = 1 / 8
KV_LEAST_BYTES = 64 << 20
# most GGUF files have four bits and a little a weight
WIDENED = 4


def estimate(size_bytes: int) -> int:
    """Bytes that a model of this file size needs at least, before it is loaded."""
    return int(size_bytes * WEIGHTS_FACTOR + max(size_bytes * KV_SHARE, KV_LEAST_BYTES))


def gpu_estimate(file: ModelFile) -> int:
    """Bytes that a model needs at least on a GPU, where a GGUF file's weights become 16 bits."""
    return estimate(file.size_bytes * (WIDENED if file.is_gguf else 1))


def footprint(info: ModelInfo) -> int:
    """Bytes that a loaded model takes: its weights and its KV pool."""
    return int(info.size_bytes * WEIGHTS_FACTOR) + info.kv_bytes


def free_bytes(limit: int | None, loaded: Iterable[ModelInfo], loading: Iterable[int]) -> int:
    """Bytes for more models; negative when they are overcommitted.

    limit: what models may use together; None: what the machine has. loading: estimates of
    models that are being read right now.
    """
    reserved = sum(loading)
    if limit is not None:
        return limit - reserved - sum(footprint(info) for info in loaded)
    # mapped weights are page cache, which the system counts as available though we need it
    mapped = sum(info.size_bytes for info in loaded if info.options.mmap)
    return int(psutil.virtual_memory().available) - reserved - mapped


def as_gb(size_bytes: float) -> str:
    """`1.5 GB`, as error messages state sizes."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
