"""The text of `/stats`: a summary for the chat's model, or all of the server's statistics."""

from __future__ import annotations

from collections.abc import Iterator

from localgen.backends.engine_stats import KVTierStats, kv_tier_name
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count, format_elapsed, format_size
from localgen.chat import report
from localgen.chat.session import ChatSession
from localgen.client.snapshot import ModelSnapshot


def summary(session: ChatSession) -> str:
    """Requests, drafts, cache reuse and memory of the model, for each replica of a cluster.

    Raises LocalgenError.
    """
    models = session.model_snapshots()
    if not models:
        return f"{session.name} is not loaded: the next prompt loads it"
    last = session.last_completion
    ctx = session.ctx or models[0].ctx or 0
    model, *rest = (row for each in models for row in _rows(each))
    found = [
        model,
        ("context", f"{session.estimate_used_tokens():,} of {ctx:,} tokens"),
        ("last answer", report.completion_line(last) if last is not None else ""),
        *rest,
    ]
    rows = (f"{name:<12} {text}" for name, text in found if text)
    return "\n".join(map(one_line, rows))


def all_values(node: object, prefix: str = "") -> list[str]:
    """One line for each value of a JSON document."""
    if isinstance(node, dict):
        # /show info has the static facts of the model
        keys = [key for key in node if key != "info"]
        inner = [(f"{prefix}.{key}" if prefix else str(key), node[key]) for key in keys]
        return [line for key, value in inner for line in all_values(value, key)]
    if isinstance(node, list) and node and isinstance(node[0], dict):
        return [
            line for at, value in enumerate(node) for line in all_values(value, f"{prefix}[{at}]")
        ]
    shown = f"{node:.1f}" if isinstance(node, float) else str(node)
    return [f"{prefix:<44} {shown}"]


def _rows(model: ModelSnapshot) -> Iterator[tuple[str, str]]:
    counters = model.counters
    yield "model", " · ".join(part for part in (model.name, model.processor) if part)
    reused = _share(counters.prefix_hits, counters.prefix_queries)
    yield "cache reuse", f"{reused} of the prompt tokens since the model was loaded"
    for tier in model.kv_tiers:
        yield f"KV {kv_tier_name(tier.tier)}", _tier_text(tier)
    accepted = _share(counters.accepted_tokens, counters.draft_tokens)
    drafts = format_count(int(counters.draft_tokens or 0), "token")
    yield "drafts", f"{drafts}, {accepted} accepted" if counters.draft_tokens else "none yet"
    yield "memory", format_size(model.memory_bytes) if model.memory_bytes else ""
    rest = ", other programs use the rest" if model.lacks_cores else ""
    threads = f"{model.threads} of at most {model.threads_max}{rest}"
    yield "threads", threads if model.threads else ""
    yield "requests", f"{model.running or 0} running, {model.waiting or 0} waiting"


def _tier_text(tier: KVTierStats) -> str:
    """Size, tokens that came from it, and the time that they saved."""
    limit = tier.limit_bytes
    parts = (
        f"{format_size(tier.num_bytes)} of {format_size(limit)}" if limit else "",
        f"{format_count(tier.hit_tokens_total, 'token')} reused",
        f"{format_elapsed(tier.saved_s_total)} saved" if tier.saved_s_total >= 1 else "",
        f"{'not written any more' if limit else 'no blocks'}: {tier.error}" if tier.error else "",
    )
    return " · ".join(part for part in parts if part)


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * (part or 0) / whole:.0f} %" if whole else "0 %"
