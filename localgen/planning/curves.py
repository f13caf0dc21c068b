"""Rooflines of a planned model: on this machine, and on GPUs known from their datasheets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.memory.kv_sizing import DEFAULT_CTX, require_trained_ctx
from localgen.backends.model_info import LoadOptions
from localgen.hub.hf_client import Notify
from localgen.machine.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator_of_device,
    find_accelerator,
)
from localgen.placement.footprint import RunnerKind, estimate_footprint, loaded_weight_bytes
from localgen.planning.plan import MemoryPlan
from localgen.planning.planner import FoundModel
from localgen.planning.resources import MachineResources
from localgen.planning.roofline import DeviceLimits, Roofline, StepCosts

THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class NamedGpu:
    """A GPU to compare with. price: per hour, None if unknown."""

    gpu: Accelerator
    price: float | None


@dataclass(frozen=True, slots=True)
class Devices:
    """What to draw curves for, besides this machine.

    tp: number of each GPU that share the model (tensor parallelism). price: of this machine per
    hour; None if unknown.
    """

    gpus: tuple[NamedGpu, ...] = ()
    tp: int = 1
    price: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCurve:
    """Roofline of a model on a device, and of its draft model there, if there is one."""

    roofline: Roofline
    draft: Roofline | None


def parse_gpu(text: str) -> NamedGpu:
    """A GPU such as `h100`, or `h100=2.50` with its price per hour. Raises InvalidRequest."""
    name, is_priced, price = text.partition("=")
    gpu = find_accelerator(name)
    if gpu is None:
        known = ", ".join(gpu.key for gpu in ACCELERATORS)
        raise InvalidRequest(f"--gpu {text}: {name or 'it'} is not known; known are {known}")
    if not is_priced:
        return NamedGpu(gpu, None)
    try:
        value = float(price)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidRequest(f"--gpu {text}: give a price per hour, such as {gpu.key}=2.50")
    return NamedGpu(gpu, value)


def model_curves(found: FoundModel, devices: Devices, notify: Notify) -> list[ModelCurve]:
    """Curves of each quantization, first on this machine, then on each GPU.

    Where only this machine cannot run the model, that is a notice. Raises InvalidRequest if the
    shape or size of a model is unknown, or GPUs cannot share it, and like plan_memory.
    """
    for one in devices.gpus:
        if devices.tp > 1 and one.gpu.link_bytes_per_s is None:
            raise InvalidRequest(f"--tp {devices.tp}: several {one.gpu.key} cannot share a model")
    return [curve for facts in found.facts for curve in _curves_of(facts, found, devices, notify)]


def _curves_of(
    facts: ModelFacts, found: FoundModel, devices: Devices, notify: Notify
) -> Iterator[ModelCurve]:
    models = [one for one in (facts, found.draft) if one is not None]
    for model in models:
        _require_known(model)
    assert facts.shape is not None
    requested, trained = found.options.ctx, facts.shape.ctx_train
    require_trained_ctx(requested, trained or requested or 0, facts.name)
    plan = _plan_here(facts, found, devices, notify)
    ctx = requested or (plan and plan.ctx) or min(DEFAULT_CTX, trained or DEFAULT_CTX)
    for device, runner in _limits(facts, plan, found, devices):
        lines = [
            Roofline(one.name, _costs(one, runner, found.options), device, ctx) for one in models
        ]
        yield ModelCurve(lines[0], lines[1] if len(lines) > 1 else None)


def _require_known(facts: ModelFacts) -> None:
    if facts.shape is None or not facts.weights_bytes:
        raise InvalidRequest(
            f"--curve: {', '.join(facts.missing)} of {facts.name} is unknown: pull the model first"
        )


def _plan_here(
    facts: ModelFacts, found: FoundModel, devices: Devices, notify: Notify
) -> MemoryPlan | None:
    """The plan for this machine; None if it cannot run the model, but the named GPUs may."""
    try:
        return found.plan(facts)
    except InvalidRequest as error:
        if not devices.gpus:
            raise
        notify(f"{THIS_MACHINE}: {error.message}")
        return None


def _limits(
    facts: ModelFacts, plan: MemoryPlan | None, found: FoundModel, devices: Devices
) -> Iterator[tuple[DeviceLimits, RunnerKind]]:
    """Devices to draw curves for. This machine is left out if its bandwidth is unknown."""
    if plan is not None and plan.speed is not None:
        runner = _runner_of(plan)
        costs = _costs(facts, runner, found.options)
        gpu = _known_gpu(plan)
        flops = _cpu_flops(plan, found.machine, costs) if gpu is None else _gpu_flops(gpu, facts)
        peak = f"measured for {plan.quant.upper()}" if gpu is None else "of the datasheet"
        here = DeviceLimits(
            name=THIS_MACHINE,
            bytes_per_s=plan.speed.bandwidth_bytes_per_s,
            flops=flops,
            attention_flops=None if gpu is None else gpu.flops,
            free_bytes=plan.free_bytes,
            source=f"bandwidth {plan.speed.how}, compute {peak if flops else 'unknown'}",
            price=devices.price,
        )
        yield here, runner
    is_widened = found.options.backend == "cuda" or not facts.is_gguf
    for one in devices.gpus:
        yield _named(one, facts, devices.tp), "cuda" if is_widened else "llamacpp"


def _runner_of(plan: MemoryPlan) -> RunnerKind:
    if plan.backend == "llamacpp":
        return "llamacpp"
    return "cuda" if plan.place == "GPU" else "cuda on cpu"


def _costs(facts: ModelFacts, runner: RunnerKind, options: LoadOptions) -> StepCosts:
    assert facts.shape is not None
    kept = loaded_weight_bytes(facts.weights_bytes, facts.params, runner, is_gguf=facts.is_gguf)
    footprint = estimate_footprint(kept, facts.shape, runner, options)
    share = facts.read_bytes / facts.weights_bytes
    key, value = footprint.cache_types
    return StepCosts(
        weights_bytes=kept,
        read_bytes=kept * share,
        flops_per_token=2 * facts.params * share if facts.params else None,
        shape=facts.shape,
        cache_types=(key, value),
        buffer_bytes=footprint.fixed_bytes,
        token_bytes=footprint.token_bytes,
    )


def _known_gpu(plan: MemoryPlan) -> Accelerator | None:
    """The GPU that holds the whole model, if its datasheet is known."""
    used = [one for one in plan.gpu_layers if one.layers]
    if len(used) != 1 or used[0].layers < used[0].of:
        return None
    return accelerator_of_device(used[0].gpu.name)


def _cpu_flops(plan: MemoryPlan, machine: MachineResources, costs: StepCosts) -> float | None:
    """Peak of llama.cpp on the CPU with the model's type of weights; None if not measured."""
    is_cpu = plan.backend == "llamacpp" and not any(one.layers for one in plan.gpu_layers)
    if not is_cpu or costs.flops_per_token is None:
        return None
    times = machine.step_times()
    if times is None:
        return None
    return times.flops(plan.quant, costs.read_bytes, costs.flops_per_token)


def _named(one: NamedGpu, facts: ModelFacts, tp: int) -> DeviceLimits:
    return DeviceLimits(
        name=one.gpu.key if tp == 1 else f"{tp} x {one.gpu.key}",
        bytes_per_s=one.gpu.bytes_per_s,
        flops=_gpu_flops(one.gpu, facts),
        attention_flops=one.gpu.flops,
        free_bytes=one.gpu.memory_bytes,
        source="datasheet",
        count=tp,
        link_bytes_per_s=one.gpu.link_bytes_per_s,
        price=one.price,
    )


def _gpu_flops(gpu: Accelerator, facts: ModelFacts) -> float:
    """Other quantized weights are multiplied in 16 bits."""
    is_fp8 = facts.quant.lower().startswith("fp8")
    return gpu.fp8_flops if is_fp8 and gpu.fp8_flops else gpu.flops
