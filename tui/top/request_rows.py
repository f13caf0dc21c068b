"""Live and ended requests of a server as table rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.engine_stats import RequestPhases, SequenceStats
from localgen.backends.machine_stats import EndedRequest
from localgen.backends.terminal_text import escape_name, one_line
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.widgets.numbers import (
    format_duration_ms,
    format_duration_s,
    format_integer,
    format_percent,
    format_rate,
)

_STATE_ORDER = {"queued": 0, "prefill": 1, "decode": 2}
_ENDED_ORDER = 3
_COURSE_COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request as shown in the table.

    state: queued, prefill, decode, or the outcome. prefilled_tokens: prompt tokens computed so far,
    without cached ones. age_s: seconds since arrival, or since the end.
    """

    id: str
    model: str
    client: str
    state: str
    is_live: bool
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    tokens_per_s: float | None
    acceptance_rate: float | None
    ctx: int
    age_s: float
    phases: RequestPhases
    prefix_break: str = ""
    restored: str = ""

    @property
    def context_fraction(self) -> float | None:
        """Used fraction of the context, or None if its length is unknown."""
        return (self.prompt_tokens + self.generated_tokens) / self.ctx if self.ctx else None

    def matches(self, text: str) -> bool:
        """True if every word of a text is in the model, the state, the client or the id."""
        where = f"{self.model} {self.state_text} {self.client} {self.id}".lower()
        return all(word in where for word in text.lower().split())

    @property
    def state_text(self) -> str:
        """The state as displayed."""
        match self.state:
            case "prefill":
                uncached = max(1, self.prompt_tokens - self.cached_tokens)
                return f"prefill {format_percent(min(1.0, self.prefilled_tokens / uncached))}"
            case "decode":
                return "decoding"
        return self.state if self.is_live else f"({self.state})"

    @property
    def state_order(self) -> int:
        """Sort key: queued first, ended last."""
        return _STATE_ORDER.get(self.state, _ENDED_ORDER) if self.is_live else _ENDED_ORDER


@dataclass(frozen=True, slots=True)
class RequestColumn:
    """A table column. min_terminal_columns: terminal width from which it is shown. width: 0 takes
    the remaining columns.
    """

    key: str
    title: str
    width: int
    min_terminal_columns: int
    format_cell: Callable[[RequestRow], str]
    sort_key: Callable[[RequestRow], float | str]
    is_numeric: bool = True


def _course_phases(phases: RequestPhases) -> tuple[tuple[str, float], ...]:
    """(character of the waterfall, milliseconds) of waiting, cached prefill, prefill and decode."""
    return (
        ("·", phases.template_ms + phases.queue_ms),
        ("░", phases.cached_ms),
        ("▒", phases.prefill_ms + phases.first_step_ms),
        ("█", phases.decode_ms),
    )


def course(phases: RequestPhases) -> str:
    """A waterfall of the phases of a request, in proportion to its time so far."""
    parts = _course_phases(phases)
    total_ms = sum(ms for _, ms in parts)
    if not total_ms:
        return ""
    text, before_ms = "", 0.0
    for character, ms in parts:
        before_ms += ms
        text += character * (round(before_ms / total_ms * _COURSE_COLUMNS) - len(text))
    return text


def _unknown_as_minus_one(value: float | None) -> float:
    return -1.0 if value is None else value


REQUEST_COLUMNS = (
    RequestColumn("model", "Model", 0, 0, lambda r: r.model, lambda r: r.model, is_numeric=False),
    RequestColumn(
        "state", "State", 12, 0, lambda r: r.state_text, lambda r: r.state_order, is_numeric=False
    ),
    RequestColumn(
        "prompt",
        "Prompt",
        7,
        0,
        lambda r: format_integer(r.prompt_tokens),
        lambda r: r.prompt_tokens,
    ),
    RequestColumn(
        "cached",
        "Cached",
        7,
        72,
        lambda r: format_integer(r.cached_tokens),
        lambda r: r.cached_tokens,
    ),
    RequestColumn(
        "answer",
        "Answer",
        7,
        0,
        lambda r: format_integer(r.generated_tokens),
        lambda r: r.generated_tokens,
    ),
    RequestColumn(
        "ttft",
        "TTFT",
        8,
        72,
        lambda r: format_duration_ms(r.ttft_ms),
        lambda r: _unknown_as_minus_one(r.ttft_ms),
    ),
    RequestColumn(
        "rate",
        "tok/s",
        7,
        0,
        lambda r: format_rate(r.tokens_per_s),
        lambda r: _unknown_as_minus_one(r.tokens_per_s),
    ),
    RequestColumn(
        "drafts",
        "Drafts",
        6,
        100,
        lambda r: format_percent(r.acceptance_rate),
        lambda r: _unknown_as_minus_one(r.acceptance_rate),
    ),
    RequestColumn(
        "context",
        "Ctx",
        5,
        90,
        lambda r: format_percent(r.context_fraction),
        lambda r: _unknown_as_minus_one(r.context_fraction),
    ),
    RequestColumn(
        "course",
        "Course",
        _COURSE_COLUMNS,
        140,
        lambda r: course(r.phases),
        lambda r: sum(ms for _, ms in _course_phases(r.phases)),
        is_numeric=False,
    ),
    RequestColumn("age", "Age", 7, 104, lambda r: format_duration_s(r.age_s), lambda r: r.age_s),
    RequestColumn(
        "client", "Client", 18, 120, lambda r: r.client, lambda r: r.client, is_numeric=False
    ),
    RequestColumn(
        "id", "Id", 14, 160, lambda r: one_line(r.id)[:12], lambda r: r.id, is_numeric=False
    ),
)


def request_rows(snapshot: ServerSnapshot, *, include_ended: bool) -> list[RequestRow] | None:
    """Live requests, then ended ones; None if the server does not list requests."""
    models = [model for model in snapshot.models if model.sequences is not None]
    if snapshot.models and not models and snapshot.finished_requests is None:
        return None
    rows = [
        _live_row(sequence, escape_name(model.name))
        for model in models
        for sequence in model.sequences or ()
    ]
    live = {row.id for row in rows}
    ended = (snapshot.finished_requests or ()) if include_ended else ()
    return rows + [_ended_row(each) for each in ended if each.request_id not in live]


def sort_request_rows(
    rows: list[RequestRow], column: RequestColumn, *, descending: bool
) -> list[RequestRow]:
    """Sort by a column, live requests always before ended ones."""

    def order(row: RequestRow) -> float | str:
        return column.sort_key(row)

    live = sorted((row for row in rows if row.is_live), key=order, reverse=descending)
    ended = sorted((row for row in rows if not row.is_live), key=order, reverse=descending)
    return live + ended


def _live_row(sequence: SequenceStats, model: str) -> RequestRow:
    phases = sequence.phases
    gaps = sequence.generated_tokens - 1
    return RequestRow(
        id=sequence.request_id,
        model=model,
        client=one_line(sequence.client),
        state=one_line(sequence.state),
        is_live=True,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        # computed tokens include those of the answer
        prefilled_tokens=max(
            0, min(sequence.computed_tokens, sequence.prompt_tokens) - sequence.cached_tokens
        ),
        generated_tokens=sequence.generated_tokens,
        ttft_ms=sequence.ttft_ms,
        tokens_per_s=gaps / phases.decode_ms * 1e3 if gaps > 0 and phases.decode_ms else None,
        acceptance_rate=_ratio(sequence.accepted_tokens, sequence.draft_tokens),
        ctx=sequence.ctx,
        age_s=sequence.age_s,
        phases=phases,
        restored=one_line(sequence.restored),
    )


def _ended_row(ended: EndedRequest) -> RequestRow:
    return RequestRow(
        id=ended.request_id,
        model=escape_name(ended.model),
        client=one_line(ended.client),
        state=one_line(ended.outcome).replace("_", " "),
        is_live=False,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        prefilled_tokens=ended.prompt_tokens - ended.cached_tokens,
        generated_tokens=ended.generated_tokens,
        ttft_ms=ended.ttft_ms,
        tokens_per_s=ended.tokens_per_s,
        acceptance_rate=_ratio(ended.accepted_tokens, ended.draft_tokens),
        ctx=ended.ctx,
        age_s=ended.ended_ago_s,
        phases=ended.phases,
        prefix_break=one_line(ended.prefix_break),
        restored=one_line(ended.restored),
    )


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
