"""What became of each request: one line in the log, and the figures of /metrics."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from localgen.backends.types import Delta, Failed, Finished
from localgen.server.models.engine_client import Event

# how a request for vectors ends well
EMBEDDED = "embedded"
# a client's misspellings shall not become labels of figures
UNKNOWN = "unknown"
_log = logging.getLogger("localgen.requests")
LogFormat = Literal["text", "json"]


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request for text, or for vectors. Times are monotonic seconds.

    asked: the model as the client calls it; model: as the server does, once it is found.
    account: who pays for its tokens. outcome: stop, length, cancelled or embedded; the code of the
    error that ended it; gone: the client left. end: what all its answers took together; ends: each.
    gaps_s: between one text of an answer and the next, for each token of the later one:
    (seconds, tokens). last: tokens of an answer so far, and when they came.
    """

    id: str
    asked: str
    client: str
    account: str
    arrived_s: float
    model: str = UNKNOWN
    outcome: str = "gone"
    end: Finished | None = None
    ends: list[Finished] = field(default_factory=list)
    gaps_s: list[tuple[float, int]] = field(default_factory=list)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    ended_s: float = 0.0
    num_tokens: int = 0

    def see(self, events: list[Event]) -> None:
        """Events that have just come."""
        now_s = time.monotonic()
        for event in events:
            match event:
                case Delta():
                    self._see_text(event, now_s)
                case Finished():
                    self.ends.append(event)
                case Failed():
                    self.outcome = event.code

    def _see_text(self, delta: Delta, now_s: float) -> None:
        before, last_s = self.last.get(delta.request_id, (0, None))
        new = delta.num_tokens - before
        if last_s is not None and new:
            self.gaps_s.append(((now_s - last_s) / new, new))
        self.last[delta.request_id] = delta.num_tokens, now_s
        self.num_tokens += new

    def finish(self, total: Finished) -> None:
        """All its answers have ended well."""
        self.end, self.outcome = total, total.reason


class Observer(Protocol):
    """Who wants to know of ended requests."""

    def ended(self, entry: Entry) -> None: ...


class Journal:
    """Writes down requests that have ended."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def close(self, entry: Entry) -> None:
        """The request has ended, however it did."""
        entry.ended_s = time.monotonic()
        for observer in self._observers:
            observer.ended(entry)
        _log.info("request", extra={"fields": fields_of(entry)})


def fields_of(entry: Entry) -> dict[str, str | int | float]:
    """What the log says of a request; times in milliseconds."""
    fields: dict[str, str | int | float] = {
        "id": entry.id,
        "model": entry.asked if entry.model == UNKNOWN else entry.model,
        "client": entry.client,
        "outcome": entry.outcome,
        "total_ms": _ms(entry.ended_s - entry.arrived_s),
    }
    if entry.end is None:
        return fields | {"answer_tokens": entry.num_tokens}
    timings = entry.end.timings
    return fields | {
        "queue_ms": round(timings.queue_ms, 1),
        "template_ms": round(timings.template_ms, 1),
        "prefill_ms": round(timings.prompt_ms, 1),
        "decode_ms": round(timings.predicted_ms, 1),
        "ttft_ms": round(timings.ttft_ms, 1),
        "cached_tokens": timings.cache_n,
        "new_tokens": timings.prompt_n,
        "answer_tokens": entry.end.completion_tokens,
        "tokens_per_s": round(timings.predicted_per_second, 1),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def formatter(kind: LogFormat = "text") -> logging.Formatter:
    """One line for each record. What is passed as `extra={"fields": {…}}` follows the message."""
    return _Json() if kind == "json" else _Text("%(asctime)s %(levelname)s %(message)s")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = (f" {name}={_word(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(pairs)


def _word(value: object) -> str:
    """As one word: a name that a client chose could forge a line or another field."""
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
