"""Choose the best quantization of a model that fits in this machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localgen.backends.errors import OutOfMemory
from localgen.backends.units import format_size
from localgen.config import ServerSettings
from localgen.hub.catalog import CatalogEntry
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, detect_hardware
from localgen.placement.footprint import estimate_footprint, loaded_weight_bytes, useful_ctx

# more bits double the memory traffic for a quality difference that is hard to measure
_FULL_PRECISION = ("F16", "BF16", "F32")

_FOUR_BIT_METHODS = ("awq-int4", "gptq-int4", "w4a16", "mxfp4")

ProcessorKind = Literal["GPU", "CPU"]


@dataclass(frozen=True, slots=True)
class QuantOption:
    """An available quantization. quant: its tag. size_bytes: size of its weights."""

    quant: str
    size_bytes: int
    is_gguf: bool = True


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Free memory for models, in bytes.

    has_llamacpp_gpu: llama.cpp can compute on a GPU, with quantized GGUF weights. has_cuda_backend:
    the cuda backend can run, which dequantizes GGUF weights to 16 bits.
    """

    ram_bytes: int
    gpu_bytes: int = 0
    has_llamacpp_gpu: bool = False
    has_cuda_backend: bool = False


@dataclass(frozen=True, slots=True)
class QuantFit:
    """Memory that an option needs, and where it would run; None if it does not fit."""

    option: QuantOption
    need_bytes: int
    place: ProcessorKind | None


def available_memory(hardware: Hardware | None = None) -> AvailableMemory:
    """Memory of this machine that is free now, within LOCALGEN_MEMORY_LIMIT."""
    there = hardware or detect_hardware()
    ram = free_memory.free_memory_bytes(ServerSettings.from_environment().memory_limit, (), ())
    usable = there.cuda_unavailable_reason is None
    own_bits = bool(there.gpus) and there.llamacpp_has_gpu()
    gpu = max((gpu.free_bytes for gpu in there.gpus), default=0) if usable or own_bits else 0
    return AvailableMemory(ram, gpu, own_bits, usable)


def fit_quants(
    options: Sequence[QuantOption], available: AvailableMemory, entry: CatalogEntry | None
) -> list[QuantFit]:
    """Estimate where each option fits, with a useful context length. Largest first."""
    ordered = sorted(options, key=lambda one: -one.size_bytes)
    return [_fit_quant(alternative, available, entry) for alternative in ordered]


def best_fit(fits: Sequence[QuantFit]) -> QuantFit | None:
    """Return the best option that fits: on the GPU if possible, then the largest up to 8 bits."""
    able = [fit for fit in fits if fit.place]
    return min(able, key=_preference, default=None)


def safetensors_options(
    entry: CatalogEntry | None, available: AvailableMemory
) -> list[QuantOption]:
    """Return the catalog's safetensors sources, if the cuda backend can run here.

    Unknown sizes are estimated from the bits per weight.
    """
    if entry is None or not available.has_cuda_backend:
        return []
    ways = []
    for folder in entry.safetensors:
        guessed = (entry.params or 0) * _bytes_per_weight(folder.method)
        size_bytes = folder.size_bytes or round(guessed)
        if size_bytes:
            ways.append(QuantOption(folder.method, size_bytes, is_gguf=False))
    return ways


def choose_quant(
    options: Sequence[QuantOption],
    name: str,
    entry: CatalogEntry | None,
    available: AvailableMemory,
) -> tuple[QuantFit, str]:
    """Return the best option for this machine, and the reason. Raises OutOfMemory if none fits."""
    found = fit_quants(options, available, entry)
    chosen = best_fit(found)
    if chosen is None:
        least = found[-1]
        raise OutOfMemory(
            f"no quantization of {name} fits: the smallest, {least.option.quant}, needs "
            f"{format_size(least.need_bytes)} with a context of {_useful_ctx(entry):,}, "
            f"{format_size(max(available.ram_bytes, available.gpu_bytes))} are free"
        )
    return chosen, fit_reason(chosen, found, available, entry)


def fit_reason(
    chosen: QuantFit,
    fits: Sequence[QuantFit],
    available: AvailableMemory,
    entry: CatalogEntry | None,
) -> str:
    """Explain the choice: memory needed and free, and why the next larger option was not chosen."""
    there = available.gpu_bytes if chosen.place == "GPU" else available.ram_bytes
    memory_of = "the GPU" if chosen.place == "GPU" else "memory"
    text = (
        f"{chosen.option.quant} needs {format_size(chosen.need_bytes)} of {memory_of} with a "
        f"context of {_useful_ctx(entry):,}, {format_size(there)} are free"
    )
    larger = [fit for fit in fits if fit.need_bytes > chosen.need_bytes]
    if not larger:
        return text
    following = larger[-1]
    if following.place == chosen.place:
        return f"{text}; {following.option.quant} fits, but takes twice as long per token"
    if following.place is None:
        return f"{text}; {following.option.quant} would need {format_size(following.need_bytes)}"
    return f"{text}; {following.option.quant} would run on the {following.place}"


def _bytes_per_weight(method: str) -> float:
    if method == "safetensors":
        return 2.0
    # four bits with scales, and the embedding in 16 bits
    return 0.65 if method in _FOUR_BIT_METHODS else 1.1


def _preference(fit: QuantFit) -> tuple[bool, bool, int]:
    wide = fit.option.is_gguf and fit.option.quant.upper() in _FULL_PRECISION
    return fit.place != "GPU", wide, -fit.option.size_bytes


def _useful_ctx(entry: CatalogEntry | None) -> int:
    return useful_ctx(entry.shape if entry else None)


def _fit_quant(
    option: QuantOption, available: AvailableMemory, entry: CatalogEntry | None
) -> QuantFit:
    shape = entry.shape if entry else None
    if not option.is_gguf:
        need = estimate_footprint(option.size_bytes, shape, "cuda").need_bytes()
        return QuantFit(
            option,
            need,
            "GPU" if available.has_cuda_backend and need <= available.gpu_bytes else None,
        )
    need = on_gpu = estimate_footprint(option.size_bytes, shape).need_bytes()
    if not available.has_llamacpp_gpu:
        params = entry.params if entry else None
        wide = loaded_weight_bytes(option.size_bytes, params, "cuda", is_gguf=True)
        on_gpu = estimate_footprint(wide, shape, "cuda").need_bytes()
    if (available.has_llamacpp_gpu or available.has_cuda_backend) and on_gpu <= available.gpu_bytes:
        return QuantFit(option, on_gpu, "GPU")
    return QuantFit(option, need, "CPU" if need <= available.ram_bytes else None)
