"""Resolve and validate load options for the CUDA backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from localgen.backends.errors import InvalidRequest
from localgen.backends.memory.load_defaults import CUDA_DEFAULTS, CUDA_ON_CPU_DEFAULTS
from localgen.backends.memory.load_limits import validate_device, validate_load_options
from localgen.backends.model_info import DRAFT_NGRAM, LoadOptions, option_flag
from localgen.backends.types import MAX_DRAFT_TOKENS

# data types of the KV cache by option value
CACHE_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
CACHE_DTYPE_NAMES = {dtype: name for name, dtype in CACHE_DTYPES.items()}
# minimum compute capability of the FP8 kernels
_MIN_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """Resolved LoadOptions of the CUDA backend; only ctx and kv_tokens may still be open.

    device: cuda, cuda:N or cpu; `cuda` for several GPUs.
    tp: tensor-parallel size.
    dummy: random weights of the model's shapes.
    """

    backend: str = "cuda"
    device: str = "cuda"
    dummy: bool = False
    tp: int = 1
    parallel: int = CUDA_DEFAULTS.parallel
    cache_type_k: str = CUDA_DEFAULTS.cache_type
    cache_type_v: str = CUDA_DEFAULTS.cache_type
    prefix_cache: bool = True
    max_batch_tokens: int = CUDA_DEFAULTS.max_batch_tokens
    itl_target_ms: float = 100.0
    max_queue: int = 512
    ctx: int | None = None
    kv_tokens: int | None = None
    chat_template: str | None = None
    draft: str = DRAFT_NGRAM
    draft_max: int = MAX_DRAFT_TOKENS
    # 0 until a PrefixStore is opened
    kv_ram: int = 0
    kv_disk: int = 0
    kv_listen: str | None = None
    kv_peer: str | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        return CACHE_DTYPES[self.cache_type_k]

    def to_load_options(self, ctx: int, kv_tokens: int) -> LoadOptions:
        """The resolved options as reported to clients."""
        return LoadOptions(**(asdict(self) | {"ctx": ctx, "kv_tokens": kv_tokens}))


_OPTION_NAMES = {field.name for field in fields(CudaOptions)}
_CPU_DEFAULTS = {
    "parallel": CUDA_ON_CPU_DEFAULTS.parallel,
    "max_batch_tokens": CUDA_ON_CPU_DEFAULTS.max_batch_tokens,
    "itl_target_ms": 2000.0,
}


def resolve_cuda_options(
    requested: LoadOptions, dtype: torch.dtype, device: torch.device
) -> CudaOptions:
    """Return the requested options with defaults for the rest.

    dtype: compute type of the model. Raises InvalidRequest if an option is unknown or invalid.
    """
    validate_load_options(requested)
    given = {name: value for name, value in asdict(requested).items() if value is not None}
    for name in given:
        if name not in _OPTION_NAMES:
            raise InvalidRequest(
                f"{option_flag(name)} is not an option of the cuda backend: omit it, "
                "or use --backend llamacpp",
                param=name,
            )
    chosen = {"cache_type_k": CACHE_DTYPE_NAMES[dtype], "cache_type_v": CACHE_DTYPE_NAMES[dtype]}
    several = device.type == "cuda" and (requested.tp or 1) > 1
    fixed = {"backend": "cuda", "device": "cuda" if several else str(device)}
    defaults: dict[str, Any] = _CPU_DEFAULTS if device.type == "cpu" else {}
    settings = CudaOptions(**(defaults | chosen | given | fixed))
    _check_options(settings, dtype, device)
    return settings


def resolve_device(requested: LoadOptions) -> torch.device:
    """Return the requested device, by default the first GPU.

    Raises InvalidRequest if the device does not exist or conflicts with --tp.
    """
    validate_device(requested.device)
    name = requested.device or "cuda"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise InvalidRequest(
            "the cuda backend found no NVIDIA GPU that this build of torch can use: "
            "use --backend llamacpp, or --device cpu (slow)",
            param="device",
        )
    count, tp = torch.cuda.device_count(), requested.tp or 1
    if tp > count:
        raise InvalidRequest(
            f"--tp {tp} needs {tp} GPUs, there {_gpu_count_text(count)}", param="tp"
        )
    if tp > 1 and device.index is not None:
        raise InvalidRequest(
            f"--tp {tp} uses the first {tp} GPUs: leave out --device {name}, "
            "set CUDA_VISIBLE_DEVICES to select GPUs",
            param="device",
        )
    if (device.index or 0) >= count:
        raise InvalidRequest(
            f"--device is {name!r}, but only {count} GPUs were found (the first is cuda:0)",
            param="device",
        )
    return torch.device("cuda", device.index or 0)


def _gpu_count_text(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _check_options(options: CudaOptions, dtype: torch.dtype, device: torch.device) -> None:
    if options.max_batch_tokens < options.parallel:
        raise InvalidRequest(
            f"--batch-size {options.max_batch_tokens} is less than --parallel "
            f"{options.parallel}: each running request needs one token per step",
            param="max_batch_tokens",
        )
    _check_cache_type(options, dtype, device)


def _check_cache_type(options: CudaOptions, dtype: torch.dtype, device: torch.device) -> None:
    known = (CACHE_DTYPE_NAMES[dtype], "int8", "fp8")
    for name in ("cache_type_k", "cache_type_v"):
        value = getattr(options, name)
        if value not in known:
            raise InvalidRequest(
                f"{option_flag(name)} is {value!r}, "
                f"for this model it must be one of {', '.join(known)}",
                param=name,
            )
    if options.cache_type_k != options.cache_type_v:
        raise InvalidRequest(
            f"--cache-type-k is {options.cache_type_k} and --cache-type-v {options.cache_type_v}: "
            "the cuda backend needs the same type for both",
            param="cache_type_v",
        )
    if options.cache_type_k == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _MIN_FP8_CAPABILITY:
            raise InvalidRequest(
                f"an fp8 KV cache needs a GPU of compute capability 8.9, this one has "
                f"{capability[0]}.{capability[1]}: use int8",
                param="cache_type_k",
            )
