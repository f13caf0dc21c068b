"""Plans as a table for people and as JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from localgen.backends.terminal_text import one_line
from localgen.backends.units import size
from localgen.cli import tables
from localgen.planning.loaded_usage import Loaded
from localgen.planning.plan import Plan
from localgen.planning.planner import Plans

_SOURCES = {"files": "here", "hub": "not here yet, as the hub has it", "catalog": "not here yet"}
_UNKNOWN = "not known"
Row = tuple[str, str, str, str]
_NOTHING = Loaded(
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


def as_text(found: Plans) -> str:
    """One model: a line for each figure. Several quantizations: a line for each."""
    if len(found.plans) > 1:
        return "\n".join(_comparison(found.plans))
    (plan,) = found.plans
    head = f"{plan.name}, {_SOURCES[plan.source]}; {_where(plan)}"
    rows = list(_rows(plan, found.loaded))
    table: list[tuple[str, ...]] = [("", "ESTIMATE", "LOADED", ""), *rows]
    if found.loaded is None:
        table = [(name, estimate, note) for name, estimate, _, note in table]
    missing = f"not known: {', '.join(plan.missing)}"
    return "\n".join(
        [one_line(head), "", *tables.aligned(table), *([missing] if plan.missing else [])]
    )


def as_json(found: Plans) -> str:
    """One object: plans, and what is loaded or null."""
    loaded = asdict(found.loaded) if found.loaded else None
    if loaded is not None:
        del loaded["options"]  # a template among them is pages long, and plans name the others
    plans = [_without_gpu_details(asdict(plan)) | {"fits": plan.fits} for plan in found.plans]
    return tables.json_text({"plans": plans, "loaded": loaded}, indent=2)


def tell(line: str) -> None:
    """What happens on the way, beside the answer."""
    print(one_line(line), file=sys.stderr)


def _without_gpu_details(record: dict[str, Any]) -> dict[str, Any]:
    record["gpu_layers"] = [
        {"gpu": one["gpu"]["name"], "index": one["gpu"]["index"]}
        | {"layers": one["layers"], "of": one["of"]}
        for one in record["gpu_layers"]
    ]
    return record


def _where(plan: Plan) -> str:
    return f"{plan.backend} on the {plan.place}: {plan.reason}"


def _rows(plan: Plan, loaded: Loaded | None) -> Iterator[Row]:
    used = loaded or _NOTHING
    yield "weights", _size(plan.weights_bytes), _size(used.weights_bytes), plan.quant
    yield "KV cache", _size(plan.kv_bytes), _size(used.kv_bytes), _cache(plan)
    yield "buffers", _size(plan.work_bytes), _size(used.work_bytes), "for computing"
    if plan.draft or used.draft:
        yield "draft model", *_draft(plan, used)
    free = f"of {size(max(0, plan.free_bytes))} that are free{_process(loaded)}"
    yield "together", _size(plan.total_bytes), _size(used.total_bytes), free
    yield "context", _count(plan.ctx), _count(used.ctx), _context(plan)
    yield "GPU layers", _layers(plan), used.processor, _why_layers(plan)
    yield "speed", _speed(plan), "", _why_speed(plan)


def _draft(plan: Plan, used: Loaded) -> tuple[str, str, str]:
    """What it would take, what it takes, and what that is."""
    draft, allocated = plan.draft, _size(used.draft_bytes) if used.draft else ""
    if draft is None:
        return "", allocated, ""
    cache = f", KV cache {size(draft.kv_bytes)}" if draft.kv_bytes else ""
    note = f"{draft.name}: weights {_size(draft.weights_bytes)}{cache}"
    return _size(draft.total_bytes), allocated, note


def _process(loaded: Loaded | None) -> str:
    if loaded is None:
        return ""
    on_gpu = f", {size(loaded.gpu_bytes)} on the GPU" if loaded.gpu_bytes else ""
    return f"; the process: {size(loaded.rss_bytes)} resident{on_gpu}"


def _size(bytes_: int | None) -> str:
    return _UNKNOWN if not bytes_ else size(bytes_)


def _count(number: int | None) -> str:
    return _UNKNOWN if not number else f"{number:,}"


def _cache(plan: Plan) -> str:
    if plan.kv_bytes_per_1k is None:
        return ""
    types = plan.cache_type_k
    if plan.cache_type_v != types:
        types = f"{types} and {plan.cache_type_v}"
    return f"{plan.kv_tokens:,} tokens, {size(plan.kv_bytes_per_1k)} for 1,000 in {types}"


def _context(plan: Plan) -> str:
    if plan.largest_ctx is None:
        return "what would fit is not known"
    if plan.largest_ctx == plan.ctx_train:
        return f"{plan.largest_ctx:,} would fit, the model's own"
    return f"{plan.largest_ctx:,} would fit, the model's own is {plan.ctx_train:,}"


def _layers(plan: Plan) -> str:
    if not plan.gpu_layers:
        return f"0 of {plan.layers}" if plan.layers else "0"
    return " + ".join(f"{one.layers} of {one.of}" for one in plan.gpu_layers)


def _why_layers(plan: Plan) -> str:
    if not plan.gpu_layers:
        return plan.reason
    return ", ".join(one.gpu.name for one in plan.gpu_layers)


def _speed(plan: Plan) -> str:
    if plan.speed is None:
        return _UNKNOWN
    return f"at most {_rate(plan.speed.most_tokens_per_s)} tokens/s"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 100 else f"{tokens_per_s:,.0f}"


def _why_speed(plan: Plan) -> str:
    if plan.speed is None:
        return "what a token reads, or how fast, is not known"
    full = f"{_rate(plan.speed.most_tokens_per_s_full)} with a full context; " if plan.ctx else ""
    rate = f"{plan.speed.bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
    return f"{full}what this memory's bandwidth allows, {rate} {plan.speed.how}"


def _comparison(plans: tuple[Plan, ...]) -> list[str]:
    head = ("QUANT", "WEIGHTS", "NEEDS", "FREE", "CONTEXT", "RUNS ON", "AT MOST", "")
    rows = [
        (
            plan.quant,
            _size(plan.weights_bytes),
            _size(plan.total_bytes),
            size(max(0, plan.free_bytes)),
            _count(plan.largest_ctx),
            {True: plan.place, False: "does not fit", None: _UNKNOWN}[plan.fits],
            f"{_rate(plan.speed.most_tokens_per_s)} tokens/s" if plan.speed else _UNKNOWN,
            "here" if plan.source == "files" else "",
        )
        for plan in plans
    ]
    speed = next((plan.speed for plan in plans if plan.speed), None)
    lines = [f"{plans[0].name.partition(':')[0]}, {_SOURCES[plans[0].source]}", ""]
    lines += tables.aligned([head, *rows])
    if speed is not None:
        rate = f"{speed.bandwidth_bytes_per_s / 1e9:,.1f} GB/s"
        lines += ["", f"AT MOST: what this memory's bandwidth allows, {rate} {speed.how}."]
    return lines
