"""Load options, settled for this device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from localgen.backends.engine.speculation.speculation import MOST_DRAFTS
from localgen.backends.errors import InvalidRequest
from localgen.backends.memory.load_defaults import CUDA, CUDA_ON_CPU
from localgen.backends.model_info import NGRAM, LoadOptions

# what the cache may be kept in, besides the type of the weights
CACHE_TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
CACHE_NAMES = {dtype: name for name, dtype in CACHE_TYPES.items()}
# FP8 numbers are read by kernels from this compute capability on
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """LoadOptions of this backend with nothing left open but the sizes, which need the model.

    device: cuda, cuda:N or cpu. tp: ranks; on GPUs of their own, device is cuda then. dummy: random
    weights of the model's shapes.
    """

    backend: str = "cuda"
    device: str = "cuda"
    dummy: bool = False
    tp: int = 1
    parallel: int = CUDA.parallel
    cache_type_k: str = CUDA.cache_type
    cache_type_v: str = CUDA.cache_type
    prefix_cache: bool = True
    max_batch_tokens: int = CUDA.max_batch_tokens
    itl_target_ms: float = 100.0
    max_queue: int = 512
    ctx: int | None = None
    kv_tokens: int | None = None
    chat_template: str | None = None
    draft: str = NGRAM
    draft_max: int = MOST_DRAFTS

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of cached keys and values."""
        return CACHE_TYPES[self.cache_type_k]

    def with_sizes(self, ctx: int, kv_tokens: int) -> LoadOptions:
        """The options in force, as a client sees them."""
        return LoadOptions(**(asdict(self) | {"ctx": ctx, "kv_tokens": kv_tokens}))


_KNOWN = {field.name for field in fields(Settings)}
_ON_CPU = {
    "parallel": CUDA_ON_CPU.parallel,
    "max_batch_tokens": CUDA_ON_CPU.max_batch_tokens,
    "itl_target_ms": 2000.0,
}


def settle(asked: LoadOptions, dtype: torch.dtype, device: torch.device) -> Settings:
    """What was asked, and a choice for the rest. dtype: of the weights. InvalidRequest."""
    given = {name: value for name, value in asdict(asked).items() if value is not None}
    for name in given:
        if name not in _KNOWN:
            raise InvalidRequest(
                f"{name} is not an option of the cuda backend: leave it out, or --backend llamacpp",
                param=name,
            )
    chosen = {"cache_type_k": CACHE_NAMES[dtype], "cache_type_v": CACHE_NAMES[dtype]}
    several = device.type == "cuda" and (asked.tp or 1) > 1
    fixed = {"backend": "cuda", "device": "cuda" if several else str(device)}
    defaults: dict[str, Any] = _ON_CPU if device.type == "cpu" else {}
    settings = Settings(**(defaults | chosen | given | fixed))
    _check(settings, dtype, device)
    return settings


def device_of(asked: LoadOptions) -> torch.device:
    """The device asked for, or the GPU; of several the first. InvalidRequest: there is none."""
    name = asked.device or "cuda"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise InvalidRequest(f"device is {name!r}, it must be cuda, cuda:N or cpu", param="device")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise InvalidRequest(
            "the cuda backend finds no NVIDIA GPU that this build of torch can use: "
            "--backend llamacpp, or --device cpu to run it slowly",
            param="device",
        )
    count, tp = torch.cuda.device_count(), asked.tp or 1
    if tp > count:
        raise InvalidRequest(f"--tp {tp} needs {tp} GPUs, there {_found(count)}", param="tp")
    if tp > 1 and device.index is not None:
        raise InvalidRequest(
            f"--tp {tp} takes the first {tp} GPUs: leave out --device {name}, "
            "CUDA_VISIBLE_DEVICES says which are first",
            param="device",
        )
    if (device.index or 0) >= count:
        raise InvalidRequest(f"device is {name!r}, there are {count} GPUs, from 0", param="device")
    return torch.device("cuda", device.index or 0)


def _found(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _check(options: Settings, dtype: torch.dtype, device: torch.device) -> None:
    for name in ("tp", "parallel", "kv_tokens", "max_batch_tokens", "max_queue", "itl_target_ms"):
        value = getattr(options, name)
        if value is not None and not value >= 1:  # NaN fails too
            raise InvalidRequest(f"{name} is {value}, it must be at least 1", param=name)
    if options.max_batch_tokens < options.parallel:
        raise InvalidRequest(
            f"max_batch_tokens {options.max_batch_tokens} is less than parallel "
            f"{options.parallel}: each running request needs a token in every step",
            param="max_batch_tokens",
        )
    _check_cache(options, dtype, device)


def _check_cache(options: Settings, dtype: torch.dtype, device: torch.device) -> None:
    known = (CACHE_NAMES[dtype], "int8", "fp8")
    for name in ("cache_type_k", "cache_type_v"):
        value = getattr(options, name)
        if value not in known:
            raise InvalidRequest(
                f"{name} is {value!r}, for this model it must be one of {', '.join(known)}",
                param=name,
            )
    if options.cache_type_k != options.cache_type_v:
        raise InvalidRequest(
            f"cache_type_k is {options.cache_type_k} and cache_type_v {options.cache_type_v}: "
            "the cuda backend keeps both in the same type",
            param="cache_type_v",
        )
    if options.cache_type_k == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            raise InvalidRequest(
                f"a cache in fp8 needs a GPU of compute capability 8.9, this one has "
                f"{capability[0]}.{capability[1]}: use int8",
                param="cache_type_k",
            )
