"""Quantization methods for this machine: what fits, where it runs, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.hf.config import shape_from_hf_config
from localgen.backends.formats.hf.folder import read_json
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.hub.quant_choice import AvailableMemory, ProcessorKind
from localgen.machine.step_times import StepTimes
from localgen.placement.footprint import RunnerKind, estimate_footprint, loaded_weight_bytes
from localgen.quant.request.events import MethodEstimate

# llama.cpp's type of the head is Q6_K where that of the others is smaller
_MIN_HEAD_GGUF_BITS = 6.56
# bits per weight of the linears, with scales and zero points
_BITS_PER_WEIGHT_G128 = {4: 4.16, 3: 3.15, 8: 8.19}


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Weights of a model. linear: in the linears of layers. head: in the output head, which may be
    the embedding. other: in all other tensors."""

    linear: int
    head: int
    other: int

    @property
    def total(self) -> int:
        return self.linear + self.head + self.other


@dataclass(frozen=True, slots=True)
class MethodPreset:
    """option: arguments of `localgen quantize`. bits_per_weight: of the linears. uses_cuda_backend:
    the result runs on localgen's own engine, else on llama.cpp."""

    option: str
    bits_per_weight: float
    uses_cuda_backend: bool
    trade: str

    @property
    def gguf_type(self) -> str:
        """Type of the GGUF file; empty if it is none."""
        return self.option.partition("--gguf ")[2]

    def num_bytes(self, weights: WeightCounts) -> int:
        """Size of the result."""
        bits = self.bits_per_weight
        if not self.gguf_type:
            return round((weights.linear * bits + (weights.head + weights.other) * 16) / 8)
        head = weights.head * max(bits, _MIN_HEAD_GGUF_BITS)
        return round(((weights.linear + weights.other) * bits + head) / 8)


# usually smallest loss first
_PRESETS = (
    MethodPreset("--fp8", 8.0, True, "hardly any loss; no calibration"),
    MethodPreset("--gguf Q8_0", 8.5, False, "hardly any loss; no calibration"),
    MethodPreset("--gguf Q6_K", 6.56, False, "little loss; no calibration"),
    MethodPreset("--gguf Q5_K_M", 5.7, False, "little loss; an importance matrix helps"),
    MethodPreset("--gptq", _BITS_PER_WEIGHT_G128[4], True, "small loss; takes calibration"),
    MethodPreset(
        "--awq",
        _BITS_PER_WEIGHT_G128[4],
        True,
        "small loss; takes calibration, read by most engines",
    ),
    MethodPreset("--awq --gguf Q4_K_M", 4.85, False, "small loss; takes calibration"),
    MethodPreset("--awq --gguf Q4_0", 4.5, False, "more loss than Q4_K_M; takes calibration"),
    MethodPreset(
        "--rtn", _BITS_PER_WEIGHT_G128[4], True, "more loss than --awq; done in a minute or two"
    ),
    MethodPreset(
        "--gptq --bits 3",
        _BITS_PER_WEIGHT_G128[3],
        True,
        "clear loss; dequantized to 16 bits on load",
    ),
    MethodPreset("--awq --gguf Q3_K_M", 3.9, False, "clear loss; takes calibration"),
)


def estimate_methods(
    folder: Path, available: AvailableMemory, times: StepTimes | None = None
) -> list[MethodEstimate]:
    """Estimates of all methods, largest result first. Raises LoadFailed if the model is damaged."""
    shape = shape_from_hf_config(read_json(folder / "config.json"))
    if shape is None:
        raise LoadFailed(f"{folder}/config.json does not say how large the model is")
    found = _estimates(shape, _count_weights(folder), available, times)
    return sorted(found, key=lambda one: -one.size_bytes)


def best_method(estimates: list[MethodEstimate]) -> MethodEstimate | None:
    """The recommended method: GPU before CPU, then smallest loss; None if none fits."""
    fitting = [one for one in estimates if one.place is not None]
    order = [preset.option for preset in _PRESETS]
    return min(fitting, key=lambda one: (one.place != "GPU", order.index(one.option)), default=None)


def _estimates(
    shape: ModelShape,
    weights: WeightCounts,
    available: AvailableMemory,
    times: StepTimes | None,
) -> Iterator[MethodEstimate]:
    for preset in _PRESETS:
        size = preset.num_bytes(weights)
        need, place = _memory_and_place(preset, shape, size, 2 * weights.total, available)
        rates = times.rates(preset.gguf_type, size) if times and place == "CPU" else None
        yield MethodEstimate(preset.option, size, need, place, preset.trade, rates)


def _memory_and_place(
    preset: MethodPreset,
    shape: ModelShape,
    size: int,
    unquantized_bytes: int,
    available: AvailableMemory,
) -> tuple[int, ProcessorKind | None]:
    """Memory needed on the best processor, and that processor; None if it does not fit."""
    runner: RunnerKind = "cuda" if preset.uses_cuda_backend else "llamacpp"
    kept = unquantized_bytes if "--bits 3" in preset.option else size
    kept = loaded_weight_bytes(kept, None, runner, is_gguf=not preset.uses_cuda_backend)
    need = estimate_footprint(kept, shape, runner).need_bytes()
    on_gpu = available.has_cuda_backend if preset.uses_cuda_backend else available.has_llamacpp_gpu
    if on_gpu and need <= available.gpu_bytes:
        return need, "GPU"
    return need, "CPU" if not preset.uses_cuda_backend and need <= available.ram_bytes else None


def _count_weights(folder: Path) -> WeightCounts:
    checkpoint = NumpyCheckpoint(folder)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    counts = {name: prod(shape) for name, shape in shapes.items()}
    linear = sum(counts[name] for name in shapes if ".layers." in name and len(shapes[name]) > 1)
    by_name = {name.rpartition(".weight")[0].rpartition(".")[2]: counts[name] for name in shapes}
    head = by_name.get("lm_head", by_name.get("embed_tokens", 0))
    return WeightCounts(linear, head, sum(counts.values()) - linear - head)
