"""Bounds of load options that need neither the model nor its backend to be checked."""

from __future__ import annotations

import os
import re

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_shape import (
    CACHE_ELEMENT_BYTES,
    CUDA_CACHE_TYPES,
    LLAMACPP_CACHE_TYPES,
)
from localgen.backends.model_info import LoadOptions, option_flag

_LOWEST = {
    **dict.fromkeys(("ctx", "kv_tokens", "parallel", "threads", "threads_batch", "tp"), 1),
    **dict.fromkeys(("max_batch_tokens", "itl_target_ms", "max_queue", "draft_max"), 1),
    **dict.fromkeys(("kv_ram", "kv_disk"), 0),
    "gpu_layers": -1,
}
_HINTS = {"draft_max": ": --draft none for no drafts at all"}
# more threads than this only slow each other down
_THREADS_PER_PROCESSOR = 8
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def validate_load_options(options: LoadOptions) -> None:
    """Raises InvalidRequest for an option that no model and no backend accepts."""
    for name, lowest in _LOWEST.items():
        value = getattr(options, name)
        if value is not None and not value >= lowest:  # NaN fails too
            reason = f"is {value}, it must be at least {lowest}{_HINTS.get(name, '')}"
            raise InvalidRequest(f"{option_flag(name)} {reason}", param=name)
    _require_few_threads(options)
    validate_device(options.device)
    validate_cache_types(options, None)


def validate_device(device: str | None) -> None:
    """Raises InvalidRequest for a name that is no device."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise InvalidRequest(
            f"--device is {device!r}, it must be cuda, cuda:N or cpu", param="device"
        )


def validate_cache_types(options: LoadOptions, backend: str | None) -> None:
    """Raises InvalidRequest for a type that the backend lacks. None: that both backends lack."""
    by_backend = {"llamacpp": LLAMACPP_CACHE_TYPES, "cuda": CUDA_CACHE_TYPES}
    types = by_backend[backend] if backend else tuple(CACHE_ELEMENT_BYTES)
    for name in ("cache_type_k", "cache_type_v"):
        value = getattr(options, name)
        if value is not None and value not in types:
            raise InvalidRequest(
                f"{option_flag(name)} is {value!r}, it must be one of {', '.join(types)}",
                param=name,
            )


def _require_few_threads(options: LoadOptions) -> None:
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    for name in ("threads", "threads_batch"):
        value = getattr(options, name)
        if value is not None and value > most:
            raise InvalidRequest(
                f"{option_flag(name)} is {value}, it may be at most {most} on this machine, "
                f"which has {os.cpu_count()} processors",
                param=name,
            )
