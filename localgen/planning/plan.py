"""What a model would take here, what fits beside it, and how fast it can be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_shape import (
    CUDA_TYPES,
    LLAMACPP_TYPES,
    read_bytes,
)
from localgen.backends.formats.model_facts import Facts
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import as_gb
from localgen.placement.gpu_layers import GpuLayers, layers_on
from localgen.planning.placed_model import Setting, Wish, settle
from localgen.planning.resources import Machine
from localgen.planning.speed import Speed, speed


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What a draft model would take. kv_bytes: of a pool of as many tokens. None: not known."""

    name: str
    quant: str
    source: str
    weights_bytes: int
    kv_bytes: int | None
    work_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes are estimates. None: not known, for the facts in `missing` are not.

    ctx: what was asked for, or what the loader would choose; kv_tokens: the pool that it makes;
    largest_ctx: what would fit. draft: the model that drafts for it, which is in the total.
    free_bytes: for all of it, where it would run. refusal: why it does not fit, with both numbers
    and what would.
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
    speed: Speed | None
    missing: tuple[str, ...]
    refusal: str | None

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return self.refusal is None if self.total_bytes else None


def plan(
    facts: Facts,
    asked: LoadOptions,
    machine: Machine,
    others: Sequence[Facts] = (),
    *,
    draft: Facts | None = None,
) -> Plan:
    """others: the same model in other quantizations, to name one that fits. draft: the model that
    drafts for it.

    InvalidRequest: an option cannot be honoured.
    """
    wish = Wish(facts, asked, machine, draft)
    setting = settle(wish)
    _check_types(asked, setting.placement.backend)
    size, fits = setting.size(asked, facts.name)
    used, shape = setting.footprint, setting.footprint.shape
    known = bool(facts.weights_bytes and (draft is None or draft.weights_bytes))
    total = setting.total_bytes(size.kv_tokens)
    refused = known and not (fits and total <= setting.free_bytes)
    on_gpus = layers_on(machine.hardware, setting.placement, used, size.kv_tokens) if shape else ()
    return Plan(
        name=facts.name,
        quant=facts.quant,
        source=facts.source,
        path=facts.path,
        backend=setting.placement.backend,
        place="GPU" if any(one.layers for one in on_gpus) else "CPU",
        reason=setting.placement.reason,
        weights_bytes=used.weights_bytes,
        cache_type_k=used.cache_types[0],
        cache_type_v=used.cache_types[1],
        kv_bytes_per_1k=1000 * used.kv_token_bytes if shape else None,
        kv_bytes=int(size.kv_tokens * used.kv_token_bytes) if shape else None,
        work_bytes=used.fixed_bytes + int(size.kv_tokens * used.work_token_bytes),
        draft=_draft(wish, setting, size),
        total_bytes=total if known else None,
        free_bytes=setting.free_bytes,
        ctx=size.ctx if shape else None,
        kv_tokens=size.kv_tokens if shape else None,
        ctx_train=shape.ctx_train or None if shape else None,
        largest_ctx=setting.largest_ctx() if known else None,
        layers=shape.layers if shape else None,
        gpu_layers=on_gpus,
        speed=_speed(wish, setting, size, on_gpus),
        missing=facts.missing + tuple(f"{one} ({draft.name})" for one in draft.missing)
        if draft
        else facts.missing,
        refusal=_refusal(wish, others, setting, total) if refused else None,
    )


def _draft(wish: Wish, setting: Setting, size: Size) -> DraftPlan | None:
    facts, used = wish.draft, setting.beside
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
        total_bytes=used.bytes_with(tokens) if facts.weights_bytes else None,
    )


def _check_types(asked: LoadOptions, backend: str) -> None:
    types = LLAMACPP_TYPES if backend == "llamacpp" else CUDA_TYPES
    for option in ("cache_type_k", "cache_type_v"):
        kind = getattr(asked, option)
        if kind is not None and kind not in types:
            known = ", ".join(types)
            raise InvalidRequest(f"{option} is {kind!r}, it must be one of {known}", param=option)


def _refusal(wish: Wish, others: Sequence[Facts], setting: Setting, total: int) -> str:
    ways = ", or ".join(_ways_out(wish, others, setting))
    way_out = f"what would fit: {ways}" if ways else "take a smaller model, or free memory"
    free = as_gb(max(0, setting.free_bytes))
    both = wish.facts.name if wish.draft is None else f"{wish.facts.name} with {wish.draft.name}"
    return f"{both} needs {as_gb(total)}, {free} are free; {way_out}"


def _ways_out(wish: Wish, others: Sequence[Facts], setting: Setting) -> list[str]:
    """What would fit: no draft model, a smaller context, a smaller cache, a smaller
    quantization."""
    ways, asked, facts = [], wish.asked, wish.facts
    if wish.draft is not None and _fits(replace(wish, draft=None)):
        ways.append("no --draft")
    longest = setting.largest_ctx() or 0
    if longest:
        ways.append(f"--ctx {longest:,}")
    if setting.placement.backend == "llamacpp" and asked.flash_attn != "off":
        smaller = replace(asked, cache_type_k="q8_0", cache_type_v="q8_0")
        held = settle(replace(wish, asked=smaller)).largest_ctx() or 0
        if held > longest:
            ways.append(f"-ctk q8_0 -ctv q8_0 with --ctx {min(held, asked.ctx or held):,}")
    lesser = [one for one in others if 0 < one.weights_bytes < facts.weights_bytes]
    for one in sorted(lesser, key=lambda one: -one.weights_bytes):
        if _fits(replace(wish, facts=one)):
            ways.append(f"{one.quant} ({as_gb(one.weights_bytes)})")
            break
    return ways


def _fits(wish: Wish) -> bool:
    """Whether it does for sure."""
    try:
        return bool(plan(wish.facts, wish.asked, wish.machine, draft=wish.draft).fits)
    except InvalidRequest:  # it would run elsewhere, which has no such option
        return False


def _speed(
    wish: Wish, setting: Setting, size: Size, on_gpus: tuple[GpuLayers, ...]
) -> Speed | None:
    """None: what a token reads is not known."""
    facts, machine = wish.facts, wish.machine
    if not facts.weights_bytes:
        return None
    used = setting.footprint
    # weights that are widened are read so
    weights = facts.read_bytes * used.weights_bytes / facts.weights_bytes
    if used.shape is None:
        return speed(weights, 0.0, machine, on_gpus)
    key, value = used.cache_types
    cached = read_bytes(used.shape.caches, key, value, size.ctx)
    return speed(weights + used.shape.state_bytes, cached, machine, on_gpus)
