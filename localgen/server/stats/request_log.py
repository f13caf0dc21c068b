"""Request log: one line per ended request, and observers such as /metrics."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from localgen.backends.errors import ContextExceeded
from localgen.backends.terminal_text import one_line
from localgen.backends.types import Delta, Failed, Finished, RestoredTokens
from localgen.server.models.request_stream import RequestEvent

# finish reason of embedding requests
EMBEDDED_REASON = "embedded"
# outcome if the client has disconnected
GONE = "gone"
# names that match no model must not become metric labels
UNKNOWN_MODEL = "unknown"
_log = logging.getLogger("localgen.requests")
LogFormat = Literal["text", "json"]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A generation or embedding request. Times are monotonic seconds.

    requested_model: the client's name of the model. model: the unique name of the loaded one, for
    metrics. answered_model: the name in the answer and the log, or empty for the requested one.
    account: charged for its tokens. outcome: the finish reason, an error code, or `gone` if the
    client disconnected. error: message of an error that has no text of the request in it, or empty.
    total: merged result of all answers; finished: result of each.
    token_gaps_s: (seconds per token, tokens) of the deltas after the first that are not observed
    yet. first_token_s: when the first delta arrived, or None. last_delta: by request
    id, the tokens so far and when the last delta arrived. n: answers per prompt. max_tokens: of an
    answer, or None if the request has no limit.
    num_tokens: of all answers so far; num_counted: those that a TokenObserver has counted.
    """

    id: str
    requested_model: str
    client: str
    account: str
    arrived_s: float
    model: str = UNKNOWN_MODEL
    answered_model: str = ""
    outcome: str = GONE
    error: str = ""
    total: Finished | None = None
    finished: list[Finished] = field(default_factory=list)
    token_gaps_s: list[tuple[float, int]] = field(default_factory=list)
    first_token_s: float | None = None
    last_delta: dict[str, tuple[int, float]] = field(default_factory=dict)
    ended_s: float = 0.0
    num_tokens: int = 0
    num_counted: int = 0
    n: int = 1
    max_tokens: int | None = None

    def add_events(self, events: list[RequestEvent]) -> None:
        """Record events that have just arrived."""
        now_s = time.monotonic()
        for event in events:
            match event:
                case Delta():
                    self._add_delta(event, now_s)
                case Finished():
                    self.finished.append(event)
                case Failed():
                    self.fail(event.code, event.message)

    def _add_delta(self, delta: Delta, now_s: float) -> None:
        before, last_s = self.last_delta.get(delta.request_id, (0, None))
        new = delta.num_tokens - before
        if self.first_token_s is None and new:
            self.first_token_s = now_s
        if last_s is not None and new:
            self.token_gaps_s.append(((now_s - last_s) / new, new))
        self.last_delta[delta.request_id] = delta.num_tokens, now_s
        self.num_tokens += new

    def fail(self, code: str, message: str) -> None:
        """Record an error."""
        self.outcome = code
        if code == ContextExceeded.code:  # says how many tokens the prompt has
            self.error = message

    def finish(self, total: Finished) -> None:
        """Record that all answers have finished."""
        self.total, self.outcome = total, total.reason


class RequestObserver(Protocol):
    """Gets the record of each ended request."""

    def on_request_end(self, record: RequestRecord) -> None: ...


class TokenObserver(Protocol):
    """Gets the record of a request whenever it has new tokens."""

    def on_tokens(self, record: RequestRecord) -> None: ...


class RequestLog:
    """Logs ended requests and notifies observers.

    block_hash_key: for the requests, see Request; empty if no observer needs their hashes.
    """

    def __init__(
        self,
        observers: Sequence[RequestObserver],
        token_observer: TokenObserver | None = None,
        block_hash_key: bytes = b"",
    ) -> None:
        self._observers, self._token_observer = observers, token_observer
        self.block_hash_key = block_hash_key

    def add_events(self, record: RequestRecord, events: list[RequestEvent]) -> None:
        """Record events of a request that have just arrived."""
        record.add_events(events)
        if self._token_observer is not None:
            self._token_observer.on_tokens(record)

    def close(self, record: RequestRecord) -> None:
        """Log a request that has finished, failed or lost its client."""
        record.ended_s = time.monotonic()
        for observer in self._observers:
            observer.on_request_end(record)
        _log.info("request", extra={"fields": log_fields(record)})


def log_fields(record: RequestRecord) -> dict[str, str | int | float]:
    """Return the log fields of a request. Times are in milliseconds."""
    fields: dict[str, str | int | float] = {
        "id": record.id,
        "model": record.answered_model or record.requested_model,
        "client": record.client,
        "outcome": record.outcome,
        "total_ms": _ms(record.ended_s - record.arrived_s),
    }
    if record.error:
        fields["error"] = record.error
    if record.total is None:
        return fields | {"answer_tokens": record.num_tokens}
    timings = record.total.timings
    parted = timings.prefix_break
    return (
        fields
        | {
            "queue_ms": round(timings.queue_ms, 1),
            "template_ms": round(timings.template_ms, 1),
            "prefill_ms": round(timings.prompt_ms, 1),
            "decode_ms": round(timings.predicted_ms, 1),
            "ttft_ms": round(timings.ttft_ms, 1),
            "cached_tokens": timings.cache_n,
            "new_tokens": timings.prompt_n,
            "answer_tokens": record.total.completion_tokens,
            "tokens_per_s": round(timings.predicted_per_second, 1),
        }
        | _restored_fields(timings.restored)
        | ({"prefix_break": str(parted)} if parted else {})
    )


def _restored_fields(restored: Sequence[RestoredTokens]) -> dict[str, str | int | float]:
    """Cached tokens that came from other tiers, if any did; the tiers with a comma between."""
    if not restored:
        return {}
    return {
        "restored_tokens": sum(part.tokens for part in restored),
        "restored_from": ",".join(part.tier for part in restored),
        "restored_ms": round(sum(part.ms for part in restored), 1),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def create_log_formatter(log_format: LogFormat = "text") -> logging.Formatter:
    """A formatter with one line per record; `extra={"fields": {…}}` follows the message.

    Whatever the record holds, no control character is in the result but the newlines of a
    traceback, whose lines are indented: none of them can pose as a record.
    """
    return (
        _JsonFormatter()
        if log_format == "json"
        else _TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        pairs = (
            f" {name}={_quote_if_needed(value)}" for name, value in _extra_fields(record).items()
        )
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        more = [line for text in (trace, stack) if text for line in text.split("\n")]
        return "\n".join(
            [
                one_line(self.formatMessage(record) + "".join(pairs)),
                *(f"  {one_line(line)}" for line in more),
            ]
        )


def _quote_if_needed(value: object) -> str:
    """Quote values that are not a single word, so that clients cannot forge lines or fields."""
    text = str(value)
    plain = text.isprintable() and text == one_line(text) and not set(text) & set(' "=')
    if plain and text:
        return text
    quoted = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{one_line(quoted)}"'


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        } | _extra_fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
