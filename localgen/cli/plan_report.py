"""Memory plans as text tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_rate, format_size
from localgen.cli import tables
from localgen.machine.decode_rates import fastest_by_use
from localgen.planning.loaded_usage import LoadedUsage
from localgen.planning.plan import MemoryPlan
from localgen.planning.planner import PlanReport

_SOURCE_LABELS = {
    "files": "local",
    "hub": "not downloaded, sizes from the hub",
    "catalog": "not downloaded, sizes from the catalog",
}
_UNKNOWN = "unknown"
TableRow = tuple[str, str, str, str]
_NOT_LOADED = LoadedUsage(
    backend="",
    reason="",
    processor="",
    ctx=0,
    kv_tokens=0,
    weights_bytes=None,
    kv_bytes=None,
    work_bytes=None,
    draft=None,
    rss_bytes=0,
    gpu_bytes=None,
)


def plans_text(result: PlanReport) -> str:
    """One plan as a table of figures, several plans as one row each."""
    if len(result.plans) > 1:
        return "\n".join(_comparison_lines(result.plans))
    (plan,) = result.plans
    head = f"{plan.name}, {_SOURCE_LABELS[plan.source]}; {_placement(plan)}"
    rows = list(_estimate_rows(plan, result.loaded))
    table: list[tuple[str, ...]] = [("", "ESTIMATE", "LOADED", ""), *rows]
    if result.loaded is None:
        table = [(name, estimate, note) for name, estimate, _, note in table]
    missing = f"unknown: {', '.join(plan.missing)}"
    return "\n".join(
        [one_line(head), "", *tables.align_columns(table), *([missing] if plan.missing else [])]
    )


def plans_json(result: PlanReport) -> str:
    """One JSON object with `plans` and `loaded`, which is null if the model is not loaded."""
    loaded = asdict(result.loaded) if result.loaded else None
    if loaded is not None:
        del loaded["options"]  # may hold a long template; the plans name the others
    plans = [_without_gpu_details(asdict(plan)) | {"fits": plan.fits} for plan in result.plans]
    return tables.json_text({"plans": plans, "loaded": loaded}, indent=2)


def _without_gpu_details(record: dict[str, Any]) -> dict[str, Any]:
    record["gpu_layers"] = [
        {"gpu": one["gpu"]["name"], "index": one["gpu"]["index"]}
        | {"layers": one["layers"], "of": one["of"]}
        for one in record["gpu_layers"]
    ]
    return record


def _placement(plan: MemoryPlan) -> str:
    return f"{plan.backend} on the {plan.place}: {plan.reason}"


def _estimate_rows(plan: MemoryPlan, loaded: LoadedUsage | None) -> Iterator[TableRow]:
    used = loaded or _NOT_LOADED
    yield "weights", _size_cell(plan.weights_bytes), _size_cell(used.weights_bytes), plan.quant
    yield "KV cache", _size_cell(plan.kv_bytes), _size_cell(used.kv_bytes), _cache_note(plan)
    yield "buffers", _size_cell(plan.work_bytes), _size_cell(used.work_bytes), "compute buffers"
    if plan.draft or used.draft:
        yield "draft model", *_draft_cells(plan, used)
    free = f"of {format_size(max(0, plan.free_bytes))} free{_process_memory(loaded)}"
    yield "total", _size_cell(plan.total_bytes), _size_cell(used.total_bytes), free
    yield "context", _count_cell(plan.ctx), _count_cell(used.ctx), _context_note(plan)
    yield "GPU layers", _layers_cell(plan), used.processor, _layers_note(plan)
    yield "speed", _speed_cell(plan), "", _speed_note(plan)
    if plan.rates is not None:
        one, drafts, many = tables.rate_cells(plan.rates)
        note = f"measured for {plan.quant}; {drafts} if 3 drafts are accepted, {many} of 16 streams"
        yield "one stream", f"about {one} tokens/s", "", note


def _draft_cells(plan: MemoryPlan, loaded: LoadedUsage) -> tuple[str, str, str]:
    """Cells of the draft model: estimate, loaded size, note."""
    draft, allocated = plan.draft, _size_cell(loaded.draft_bytes) if loaded.draft else ""
    if draft is None:
        return "", allocated, ""
    cache = f", KV cache {format_size(draft.kv_bytes)}" if draft.kv_bytes else ""
    note = f"{draft.name}: weights {_size_cell(draft.weights_bytes)}{cache}"
    return _size_cell(draft.total_bytes), allocated, note


def _process_memory(loaded: LoadedUsage | None) -> str:
    if loaded is None:
        return ""
    on_gpu = f", {format_size(loaded.gpu_bytes)} on the GPU" if loaded.gpu_bytes else ""
    return f"; process: {format_size(loaded.rss_bytes)} resident{on_gpu}"


def _size_cell(bytes_: int | None) -> str:
    return _UNKNOWN if not bytes_ else format_size(bytes_)


def _count_cell(number: int | None) -> str:
    return _UNKNOWN if not number else f"{number:,}"


def _cache_note(plan: MemoryPlan) -> str:
    if plan.kv_bytes_per_1k is None:
        return ""
    types = plan.cache_type_k
    if plan.cache_type_v != types:
        types = f"{types} and {plan.cache_type_v}"
    tokens = f"{plan.kv_tokens:,} tokens"
    if (plan.kv_tokens or 0) > (plan.ctx or 0):
        tokens += " for all requests together"
    return f"{tokens}, {format_size(plan.kv_bytes_per_1k)} per 1,000, {types}"


def _context_note(plan: MemoryPlan) -> str:
    if plan.largest_ctx is None:
        return "largest context that fits: unknown"
    if not plan.largest_ctx:
        return f"no context fits, the model's maximum is {plan.ctx_train:,}"
    if plan.largest_ctx == plan.ctx_train:
        return f"{plan.largest_ctx:,} fits, the model's maximum"
    return f"{plan.largest_ctx:,} fits, the model's maximum is {plan.ctx_train:,}"


def _layers_cell(plan: MemoryPlan) -> str:
    if not plan.gpu_layers:
        return f"0 of {plan.layers}" if plan.layers else "0"
    return " + ".join(f"{one.layers} of {one.of}" for one in plan.gpu_layers)


def _layers_note(plan: MemoryPlan) -> str:
    if not plan.gpu_layers:
        return plan.reason
    return ", ".join(one.gpu.name for one in plan.gpu_layers)


def _speed_cell(plan: MemoryPlan) -> str:
    if plan.speed is None:
        return _UNKNOWN
    return f"at most {format_rate(plan.speed.most_tokens_per_s)} tokens/s"


def _speed_note(plan: MemoryPlan) -> str:
    if plan.speed is None:
        return "bytes read per token, or memory bandwidth, unknown"
    full = (
        f"{format_rate(plan.speed.most_tokens_per_s_full)} with full context; " if plan.ctx else ""
    )
    rate = f"{plan.speed.bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
    return f"{full}limited by memory bandwidth, {rate} {plan.speed.how}"


def _comparison_lines(plans: tuple[MemoryPlan, ...]) -> list[str]:
    fastest = fastest_by_use({plan.quant: plan.rates for plan in plans if plan.fits})
    uses = [use.upper() for use in fastest]
    head = ("QUANT", "WEIGHTS", "NEEDS", "FREE", "CONTEXT", "RUNS ON", "AT MOST", *uses, "")
    rows = [
        (
            plan.quant,
            _size_cell(plan.weights_bytes),
            _size_cell(plan.total_bytes),
            format_size(max(0, plan.free_bytes)),
            "none" if plan.largest_ctx == 0 else _count_cell(plan.largest_ctx),
            {True: plan.place, False: "does not fit", None: _UNKNOWN}[plan.fits],
            f"{format_rate(plan.speed.most_tokens_per_s)} tokens/s" if plan.speed else _UNKNOWN,
            *(tables.rate_cells(plan.rates) if fastest else ()),
            "local" if plan.source == "files" else "",
        )
        for plan in plans
    ]
    speed = next((plan.speed for plan in plans if plan.speed), None)
    head_line = f"{plans[0].name.partition(':')[0]}, {_SOURCE_LABELS[plans[0].source]}"
    lines = [one_line(head_line), ""]
    lines += tables.align_columns([head, *rows])
    if speed is not None:
        rate = f"{speed.bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
        lines += ["", f"AT MOST: limit set by memory bandwidth, {rate} {speed.how}."]
    return lines + tables.rate_notes(fastest)
