"""Memory plan of a model: memory needed, whether it fits, and an upper limit of its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_shape import (
    kv_cache_read_bytes,
)
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.memory.load_limits import validate_cache_types
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import format_size
from localgen.machine.decode_rates import DecodeRates
from localgen.machine.step_times import MEASURED_TYPES
from localgen.placement.gpu_layers import GpuLayers, assign_gpu_layers
from localgen.planning.placed_model import PlacedModel, PlanRequest, place_model
from localgen.planning.resources import MachineResources
from localgen.planning.speed import SpeedEstimate, estimate_speed


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Memory of a draft model, with a KV pool of as many tokens as the target's. None: unknown."""

    name: str
    quant: str
    source: str
    weights_bytes: int
    kv_bytes: int | None
    work_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Estimated memory in bytes. None: unknown, because of the facts listed in `missing`.

    ctx: the requested context, or the one the loader would choose.
    kv_tokens: size of the KV pool for it.
    largest_ctx: longest context that fits.
    draft: the draft model, included in total_bytes.
    free_bytes: memory available where the model would run.
    rates: measured with a small model of the same type; None on a GPU, or if not measured.
    refusal: why it does not fit, with both sizes and what would fit.
    """

    name: str
    quant: str
    source: str
    path: str | None
    backend: str
    place: str
    reason: str
    weights_bytes: int
    cache_type_k: str
    cache_type_v: str
    kv_bytes_per_1k: float | None
    kv_bytes: int | None
    work_bytes: int
    draft: DraftPlan | None
    total_bytes: int | None
    free_bytes: int
    ctx: int | None
    kv_tokens: int | None
    ctx_train: int | None
    largest_ctx: int | None
    layers: int | None
    gpu_layers: tuple[GpuLayers, ...]
    speed: SpeedEstimate | None
    rates: DecodeRates | None
    missing: tuple[str, ...]
    refusal: str | None

    @property
    def fits(self) -> bool | None:
        """None if unknown."""
        return self.refusal is None if self.total_bytes else None


def plan_memory(
    facts: ModelFacts,
    options: LoadOptions,
    resources: MachineResources,
    other_quants: Sequence[ModelFacts] = (),
    *,
    draft: ModelFacts | None = None,
) -> MemoryPlan:
    """Plan one model. Raises InvalidRequest if an option cannot be honored.

    other_quants: other quantizations of the model, to suggest one that fits.
    """
    request = PlanRequest(facts, options, resources, draft)
    placed = place_model(request)
    validate_cache_types(options, placed.placement.backend)
    size, fits = placed.choose_kv_size(options, facts.name)
    used, shape = placed.footprint, placed.footprint.shape
    known = bool(facts.weights_bytes and (draft is None or draft.weights_bytes))
    total = placed.total_bytes(size.kv_tokens)
    refused = known and not (fits and total <= placed.free_bytes)
    on_gpus = (
        assign_gpu_layers(resources.hardware, placed.placement, used, size.kv_tokens)
        if shape
        else ()
    )
    return MemoryPlan(
        name=facts.name,
        quant=facts.quant,
        source=facts.source,
        path=facts.path,
        backend=placed.placement.backend,
        place="GPU" if any(one.layers for one in on_gpus) else "CPU",
        reason=placed.placement.reason,
        weights_bytes=used.weights_bytes,
        cache_type_k=used.cache_types[0],
        cache_type_v=used.cache_types[1],
        kv_bytes_per_1k=1000 * used.kv_token_bytes if shape else None,
        kv_bytes=int(size.kv_tokens * used.kv_token_bytes) if shape else None,
        work_bytes=used.fixed_bytes + int(size.kv_tokens * used.work_token_bytes),
        draft=_draft_plan(request, placed, size),
        total_bytes=total if known else None,
        free_bytes=placed.free_bytes,
        ctx=size.ctx if shape else None,
        kv_tokens=size.kv_tokens if shape else None,
        ctx_train=shape.ctx_train or None if shape else None,
        largest_ctx=placed.largest_ctx() if known else None,
        layers=shape.num_layers if shape else None,
        gpu_layers=on_gpus,
        speed=_speed_of(request, placed, size, on_gpus),
        rates=_rates_of(request, placed, on_gpus),
        missing=facts.missing + tuple(f"{one} ({draft.name})" for one in draft.missing)
        if draft
        else facts.missing,
        refusal=_refusal(request, other_quants, placed, total) if refused else None,
    )


def _draft_plan(request: PlanRequest, placed: PlacedModel, size: KVSize) -> DraftPlan | None:
    facts, used = request.draft, placed.draft_footprint
    if facts is None or used is None:
        return None
    tokens = size.kv_tokens
    return DraftPlan(
        name=facts.name,
        quant=facts.quant,
        source=facts.source,
        weights_bytes=used.weights_bytes,
        kv_bytes=int(tokens * used.kv_token_bytes) if used.shape else None,
        work_bytes=used.fixed_bytes + int(tokens * used.work_token_bytes),
        total_bytes=used.total_bytes(tokens) if facts.weights_bytes else None,
    )


def _refusal(
    request: PlanRequest, other_quants: Sequence[ModelFacts], placed: PlacedModel, total_bytes: int
) -> str:
    ways = ", or ".join(_suggestions(request, other_quants, placed))
    way_out = f"what would fit: {ways}" if ways else "use a smaller model, or free memory"
    free = format_size(max(0, placed.free_bytes))
    both = (
        request.facts.name
        if request.draft is None
        else f"{request.facts.name} with {request.draft.name}"
    )
    return f"{both} needs {format_size(total_bytes)}, {free} are free; {way_out}"


def _suggestions(
    request: PlanRequest, other_quants: Sequence[ModelFacts], placed: PlacedModel
) -> list[str]:
    """Changes that make it fit: no draft model, less context, smaller cache, smaller weights."""
    ways, options, facts = [], request.options, request.facts
    if request.draft is not None and _fits(replace(request, draft=None)):
        ways.append("no --draft")
    longest = placed.largest_ctx() or 0
    if longest:
        ways.append(f"--ctx {longest:,}")
    if placed.placement.backend == "llamacpp" and options.flash_attn != "off":
        smaller = replace(options, cache_type_k="q8_0", cache_type_v="q8_0")
        held = place_model(replace(request, options=smaller)).largest_ctx() or 0
        if held > longest:
            ways.append(f"-ctk q8_0 -ctv q8_0 with --ctx {min(held, options.ctx or held):,}")
    lesser = [one for one in other_quants if 0 < one.weights_bytes < facts.weights_bytes]
    for one in sorted(lesser, key=lambda one: -one.weights_bytes):
        if _fits(replace(request, facts=one)):
            ways.append(f"{one.quant} ({format_size(one.weights_bytes)})")
            break
    return ways


def _fits(request: PlanRequest) -> bool:
    """Return True if it certainly fits."""
    try:
        return bool(
            plan_memory(request.facts, request.options, request.resources, draft=request.draft).fits
        )
    except InvalidRequest:  # it would run on another backend, without such an option
        return False


def _speed_of(
    request: PlanRequest, placed: PlacedModel, size: KVSize, gpu_layers: tuple[GpuLayers, ...]
) -> SpeedEstimate | None:
    """Estimate the speed. Returns None if the bytes read per token are unknown."""
    facts, machine = request.facts, request.resources
    if not facts.weights_bytes:
        return None
    used = placed.footprint
    # dequantized weights are read at their loaded size
    weights = facts.read_bytes * used.weights_bytes / facts.weights_bytes
    if used.shape is None:
        return estimate_speed(weights, 0.0, machine, gpu_layers)
    key, value = used.cache_types
    cached = kv_cache_read_bytes(used.shape.layer_caches, key, value, size.ctx)
    return estimate_speed(weights + used.shape.state_bytes, cached, machine, gpu_layers)


def _rates_of(
    request: PlanRequest, placed: PlacedModel, gpu_layers: tuple[GpuLayers, ...]
) -> DecodeRates | None:
    """Decode rates on the CPU. Returns None on a GPU, for a type that was not measured and for a
    mixture of experts, where a step of several tokens reads more experts than one token does."""
    facts = request.facts
    on_gpu = any(one.layers for one in gpu_layers)
    is_measured = facts.quant.upper() in MEASURED_TYPES and facts.weights_bytes
    if facts.shape is not None and facts.shape.num_experts:
        return None
    if on_gpu or placed.placement.backend != "llamacpp" or not is_measured:
        return None
    times = request.resources.step_times()
    return times.rates(facts.quant, facts.read_bytes) if times else None
