"""Rooflines of a planned model: on this machine, and on GPUs known from their datasheets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.memory.kv_sizing import DEFAULT_CTX, require_trained_ctx
from localgen.backends.memory.load_limits import validate_cache_types
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
from localgen.planning.planner import PlannedModel
from localgen.planning.resources import MachineResources
from localgen.planning.roofline import DeviceLimits, ModelCosts, Roofline

THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class NamedGpu:
    """A GPU to compare with. price: per hour, None if unknown."""

    gpu: Accelerator
    price: float | None


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs to draw curves for, besides this machine.

    tp: number of each GPU that share the model (tensor parallelism). price: of this machine per
    hour; None if unknown.
    """

    gpus: tuple[NamedGpu, ...] = ()
    tp: int = 1
    price: float | None = None


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


def model_curves(found: PlannedModel, devices: Devices, notify: Notify) -> list[Roofline]:
    """Curves of each quantization, first on this machine, then on each GPU, all for one context.

    Where only this machine cannot run the model, that is a notice. Raises InvalidRequest if the
    shape or size of a model is unknown, or a GPU cannot run or share it, and like plan_memory.
    """
    for one in (*found.facts, *([found.draft] if found.draft else ())):
        _require_known(one)
    for facts in found.facts:
        _require_trained_ctx(facts, found.options.ctx)
        for named in devices.gpus:
            _require_runnable(named.gpu, facts, found.options, devices.tp)
    plans = [_plan_here(facts, found, devices, notify) for facts in found.facts]
    ctx = found.options.ctx or min(
        [DEFAULT_CTX]
        + [plan.ctx for plan in plans if plan is not None and plan.ctx and plan.fits]
        + [one.shape.ctx_train for one in found.facts if one.shape and one.shape.ctx_train]
    )
    curves = [
        _curve(facts, found, device, runner, ctx)
        for facts, plan in zip(found.facts, plans, strict=True)
        for device, runner in _limits(facts, plan, found, devices)
    ]
    if not curves:
        raise InvalidRequest(f"--curve: the memory bandwidth of {THIS_MACHINE} is unknown")
    return curves


def _curve(
    facts: ModelFacts, found: PlannedModel, device: DeviceLimits, runner: RunnerKind, ctx: int
) -> Roofline:
    draft = None
    if found.draft is not None:
        costs = _costs(found.draft, runner, found.options)
        draft = Roofline(found.draft.name, costs, device, ctx)
    return Roofline(facts.name, _costs(facts, runner, found.options), device, ctx, draft)


def _require_trained_ctx(facts: ModelFacts, ctx: int | None) -> None:
    trained = facts.shape.ctx_train if facts.shape else 0
    require_trained_ctx(ctx, trained or ctx or 0, facts.name)


def _require_runnable(gpu: Accelerator, facts: ModelFacts, options: LoadOptions, tp: int) -> None:
    """Raises InvalidRequest if localgen could not run the model on this GPU."""
    if tp > 1 and gpu.link_bytes_per_s is None:
        raise InvalidRequest(f"--tp {tp}: several {gpu.key} cannot share a model")
    backend = _backend_on_gpu(facts, options, tp)
    if backend == "cuda" and not gpu.has_cuda:
        raise InvalidRequest(
            f"--gpu {gpu.key}: {facts.name} needs the cuda backend, which it has not"
        )
    validate_cache_types(options, backend)


def _backend_on_gpu(
    facts: ModelFacts, options: LoadOptions, tp: int
) -> Literal["llamacpp", "cuda"]:
    """llama.cpp for GGUF files, unless a model is shared, which only the cuda backend can."""
    is_cuda = options.backend == "cuda" or tp > 1 or not facts.is_gguf
    return "cuda" if is_cuda else "llamacpp"


def _require_known(facts: ModelFacts) -> None:
    missing = list(facts.missing)
    if facts.shape and facts.shape.num_experts and facts.read_bytes == facts.weights_bytes:
        missing.append("the size of its active experts")
    elif facts.shape is not None and facts.weights_bytes:
        return
    raise InvalidRequest(
        f"--curve: {', '.join(missing)} of {facts.name} is unknown: pull the model first"
    )


def _plan_here(
    facts: ModelFacts, found: PlannedModel, devices: Devices, notify: Notify
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
    facts: ModelFacts, plan: MemoryPlan | None, found: PlannedModel, devices: Devices
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
            free_bytes=_free_bytes(plan),
            source=f"bandwidth {plan.speed.how}, compute {peak if flops else 'unknown'}",
            price=devices.price,
        )
        yield here, runner
    for one in devices.gpus:
        backend = _backend_on_gpu(facts, found.options, devices.tp)
        yield _named(one, facts, devices.tp), backend


def _free_bytes(plan: MemoryPlan) -> float:
    """Memory for the model: of the GPUs that have its layers, and main memory for the others."""
    used = [one for one in plan.gpu_layers if one.layers]
    if plan.backend != "llamacpp" or not used:
        return plan.free_bytes
    is_whole = sum(one.layers for one in used) >= used[0].of
    return sum(one.gpu.free_bytes for one in used) + (0 if is_whole else plan.free_bytes)


def _runner_of(plan: MemoryPlan) -> RunnerKind:
    if plan.backend == "llamacpp":
        return "llamacpp"
    return "cuda" if plan.place == "GPU" else "cuda on cpu"


def _costs(facts: ModelFacts, runner: RunnerKind, options: LoadOptions) -> ModelCosts:
    assert facts.shape is not None
    kept = loaded_weight_bytes(facts.weights_bytes, facts.params, runner, is_gguf=facts.is_gguf)
    # states are counted for each request
    footprint = estimate_footprint(kept, replace(facts.shape, state_bytes=0), runner, options)
    widened = kept / facts.weights_bytes
    experts = facts.expert_bytes
    if experts is None:  # what is not read for a token are the other experts
        active = facts.shape.num_active_experts / (facts.shape.num_experts or 1)
        experts = round((facts.weights_bytes - facts.read_bytes) / (1 - active))
    key, value = footprint.cache_types
    return ModelCosts(
        weights_bytes=kept,
        read_bytes=widened * facts.read_bytes,
        expert_bytes=widened * experts,
        flops_per_token=2 * facts.read_params if facts.read_params else None,
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


def _cpu_flops(plan: MemoryPlan, machine: MachineResources, costs: ModelCosts) -> float | None:
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
