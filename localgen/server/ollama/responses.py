"""Answers as Ollama prints them: pieces, then an object with the times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localgen.backends.types import Delta, Finished, PositionLogprobs, TokenLogprob, ToolCall
from localgen.server.ollama.messages import PendingCalls, printed
from localgen.server.openai.tools import whole_calls
from localgen.server.requests.choices import Choice
from localgen.server.requests.protocol import Framing, Start, encode, extras

# what its paths begin with
PATHS = "/api/"
_NS_PER_MS = 1_000_000
# from text, thinking and calls to what a line says of them
Piece = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]


def error_body(message: str) -> dict[str, str]:
    """The object that every failed request gets."""
    return {"error": message}


class Ndjson:
    """A line for each object. Nothing follows the last one, which says `done` itself."""

    content_type = "application/x-ndjson"
    end = b""

    def event(self, value: object) -> bytes:
        return encode(value) + b"\n"

    def failed(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.event(error_body(message))


NDJSON = Ndjson()


def message(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A piece of a chat."""
    cut, made = printed(calls)
    said: dict[str, Any] = {"role": "assistant", "content": text + cut}
    if thinking:
        said["thinking"] = thinking
    if made:
        said["tool_calls"] = made
    return {"message": said}


def response(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A piece of a generation, which has no calls."""
    assert not calls, "only chats have tools"
    return {"response": text} | ({"thinking": thinking} if thinking else {})


def now() -> str:
    """This moment as Ollama writes times."""
    return timestamp(time.time())


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, piece: Piece, reason: str) -> dict[str, Any]:
    """The answer to a request without a prompt. reason: load or unload."""
    head = {"model": model, "created_at": now()}
    return {**head, **piece("", "", ()), "done": True, "done_reason": reason}


@dataclass(slots=True)
class AnswerFormat:
    """Objects of /api/chat and /api/generate for one request, which has one answer.

    model: as the client calls it.
    """

    model: str
    piece: Piece
    start: Start
    framing: Framing = NDJSON
    calls: PendingCalls = field(default_factory=PendingCalls)

    def opening(self, index: int) -> list[object]:
        """An answer starts with its text."""
        return []

    def delta(self, index: int, delta: Delta) -> list[object]:
        """New text or thinking; and calls, when they are whole."""
        calls = self.calls.add(delta.tool_calls)
        if not (delta.text or delta.reasoning or calls or delta.logprobs):
            return []
        line = self._line(delta.text, delta.reasoning, calls)
        if delta.logprobs:
            line["logprobs"] = _logprobs(delta.logprobs)
        return [line]

    def ended(self, index: int, end: Finished) -> list[object]:
        """The last call."""
        calls = self.calls.rest()
        return [self._line("", "", calls)] if calls else []

    def closing(self, total: Finished) -> list[object]:
        """Why it ended, and its times."""
        return [self._line("", "", ()) | self._end(total)]

    def whole(self, choices: Sequence[Choice], total: Finished) -> dict[str, Any]:
        """The answer in one object."""
        (choice,) = choices
        text = "".join(delta.text for delta in choice.deltas)
        thinking = "".join(delta.reasoning for delta in choice.deltas)
        line = self._line(text, thinking, whole_calls(choice.deltas))
        positions = [position for delta in choice.deltas for position in delta.logprobs]
        if positions:
            line["logprobs"] = _logprobs(positions)
        return line | self._end(total)

    def _line(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        return {**head, **self.piece(text, thinking, calls), "done": False}

    def _end(self, end: Finished) -> dict[str, Any]:
        times = end.timings
        return {
            "done": True,
            # it knows no reason of its own for calls
            "done_reason": "stop" if end.reason == "tool_calls" else end.reason,
            "total_duration": _ns((time.monotonic() - self.start.arrived_s) * 1e3),
            "load_duration": _ns(self.start.load_ms),
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _ns(times.prompt_ms),
            "eval_count": end.completion_tokens,
            "eval_duration": _ns(times.predicted_ms),
            **extras(end),
        }


def _ns(ms: float) -> int:
    return round(ms * _NS_PER_MS)


def _logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    return [
        _token(position.chosen) | {"top_logprobs": [_token(token) for token in position.top]}
        for position in positions
    ]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob}
