"""Requests as rows: what a server lists of those it has and of those that have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.machine_stats import EndedRequest
from localgen.backends.terminal_text import one_line
from localgen.backends.types import Phases, SequenceStats
from localgen.client.snapshot import Snapshot
from localgen.tui.widgets import numbers

_STATES = {"queued": 0, "prefill": 1, "decode": 2}
_ENDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """state: queued, prefill, decode, or how it ended. new_tokens: of the prompt, computed so far.

    age_s: since it arrived, or since it ended.
    """

    id: str
    model: str
    client: str
    state: str
    is_live: bool
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    tokens_per_s: float | None
    acceptance: float | None
    ctx: int
    age_s: float
    phases: Phases

    @property
    def context(self) -> float | None:
        """Share of its context that is used."""
        return (self.prompt_tokens + self.generated_tokens) / self.ctx if self.ctx else None

    @property
    def state_text(self) -> str:
        """As a person reads it."""
        match self.state:
            case "prefill":
                owed = max(1, self.prompt_tokens - self.cached_tokens)
                return f"prefill {numbers.percent(min(1.0, self.new_tokens / owed))}"
            case "decode":
                return "decoding"
        return self.state if self.is_live else f"({self.state})"

    @property
    def rank(self) -> int:
        """Order of states: what waits first, what has ended last."""
        return _STATES.get(self.state, _ENDED) if self.is_live else _ENDED


@dataclass(frozen=True, slots=True)
class Column:
    """least: columns of the terminal from which on it is shown. width 0: takes what is left."""

    key: str
    title: str
    width: int
    least: int
    text: Callable[[RequestRow], str]
    order: Callable[[RequestRow], float | str]
    is_number: bool = True


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


COLUMNS = (
    Column("model", "Model", 0, 0, lambda r: r.model, lambda r: r.model, is_number=False),
    Column("state", "State", 12, 0, lambda r: r.state_text, lambda r: r.rank, is_number=False),
    Column(
        "prompt",
        "Prompt",
        7,
        0,
        lambda r: numbers.count(r.prompt_tokens),
        lambda r: r.prompt_tokens,
    ),
    Column(
        "cached",
        "Cached",
        7,
        72,
        lambda r: numbers.count(r.cached_tokens),
        lambda r: r.cached_tokens,
    ),
    Column(
        "answer",
        "Answer",
        7,
        0,
        lambda r: numbers.count(r.generated_tokens),
        lambda r: r.generated_tokens,
    ),
    Column(
        "ttft",
        "TTFT",
        8,
        72,
        lambda r: numbers.duration(r.ttft_ms),
        lambda r: _known(r.ttft_ms),
    ),
    Column(
        "rate",
        "tok/s",
        7,
        0,
        lambda r: numbers.rate(r.tokens_per_s),
        lambda r: _known(r.tokens_per_s),
    ),
    Column(
        "drafts",
        "Drafts",
        6,
        100,
        lambda r: numbers.percent(r.acceptance),
        lambda r: _known(r.acceptance),
    ),
    Column(
        "context",
        "Ctx",
        5,
        90,
        lambda r: numbers.percent(r.context),
        lambda r: _known(r.context),
    ),
    Column("age", "Age", 7, 104, lambda r: numbers.clock(r.age_s), lambda r: r.age_s),
    Column("client", "Client", 18, 120, lambda r: r.client, lambda r: r.client, is_number=False),
    Column("id", "Id", 14, 160, lambda r: one_line(r.id)[:12], lambda r: r.id, is_number=False),
)


def rows_of(snapshot: Snapshot, *, with_ended: bool) -> list[RequestRow] | None:
    """Live requests, then ended ones; None: the server does not list them."""
    models = [model for model in snapshot.models if model.sessions is not None]
    if snapshot.models and not models and snapshot.ended is None:
        return None
    rows = [
        _live(sequence, one_line(model.name))
        for model in models
        for sequence in model.sessions or ()
    ]
    live = {row.id for row in rows}
    ended = (snapshot.ended or ()) if with_ended else ()
    return rows + [_ended(each) for each in ended if each.request_id not in live]


def sorted_rows(rows: list[RequestRow], column: Column, *, descending: bool) -> list[RequestRow]:
    """Ordered by a column, those that have ended always behind those that live."""

    def order(row: RequestRow) -> float | str:
        return column.order(row)

    live = sorted((row for row in rows if row.is_live), key=order, reverse=descending)
    ended = sorted((row for row in rows if not row.is_live), key=order, reverse=descending)
    return live + ended


def _live(sequence: SequenceStats, model: str) -> RequestRow:
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
        new_tokens=max(0, sequence.computed_tokens - sequence.cached_tokens),
        generated_tokens=sequence.generated_tokens,
        ttft_ms=sequence.ttft_ms,
        tokens_per_s=gaps / phases.decode_ms * 1e3 if gaps > 0 and phases.decode_ms else None,
        acceptance=_share(sequence.accepted_tokens, sequence.draft_tokens),
        ctx=sequence.ctx,
        age_s=sequence.age_s,
        phases=phases,
    )


def _ended(ended: EndedRequest) -> RequestRow:
    return RequestRow(
        id=ended.request_id,
        model=one_line(ended.model),
        client=one_line(ended.client),
        state=one_line(ended.outcome).replace("_", " "),
        is_live=False,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        new_tokens=ended.prompt_tokens - ended.cached_tokens,
        generated_tokens=ended.generated_tokens,
        ttft_ms=ended.ttft_ms,
        tokens_per_s=ended.tokens_per_s,
        acceptance=_share(ended.accepted_tokens, ended.draft_tokens),
        ctx=ended.ctx,
        age_s=ended.ended_ago_s,
        phases=ended.phases,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
