"""Answers as Ollama prints them: pieces, then an object with the times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localgen.backends.types import Delta, Finished, PositionLogprobs, TokenLogprob, ToolCall
from localgen.server.ollama.messages import PendingToolCalls, serialize_tool_calls
from localgen.server.openai.tools import merge_tool_call_deltas
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import (
    Framing,
    ResponseMetadata,
    encode_json,
    extension_fields,
)

# what its paths begin with
API_PREFIX = "/api/"
_NS_PER_MS = 1_000_000
# from text, thinking and calls to what a line says of them
ContentBuilder = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]


def ollama_error_body(message: str) -> dict[str, str]:
    """The object that every failed request gets."""
    return {"error": message}


class NdjsonFraming:
    """A line for each object. Nothing follows the last one, which says `done` itself."""

    content_type = "application/x-ndjson"
    terminator = b""

    def encode_event(self, value: object) -> bytes:
        return encode_json(value) + b"\n"

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.encode_event(ollama_error_body(message))


NDJSON = NdjsonFraming()


def chat_content(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A piece of a chat."""
    malformed_text, tool_calls = serialize_tool_calls(calls)
    message: dict[str, Any] = {"role": "assistant", "content": text + malformed_text}
    if thinking:
        message["thinking"] = thinking
    if tool_calls:
        message["tool_calls"] = tool_calls
    return {"message": message}


def generate_content(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A piece of a generation, which has no calls."""
    assert not calls, "only chats have tools"
    return {"response": text} | ({"thinking": thinking} if thinking else {})


def now_timestamp() -> str:
    """This moment as Ollama writes times."""
    return format_timestamp(time.time())


def format_timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def load_response(model: str, build_content: ContentBuilder, reason: str) -> dict[str, Any]:
    """The answer to a request without a prompt. reason: load or unload."""
    head = {"model": model, "created_at": now_timestamp()}
    return {**head, **build_content("", "", ()), "done": True, "done_reason": reason}


@dataclass(slots=True)
class OllamaSerializer:
    """Objects of /api/chat and /api/generate for one request, which has one answer.

    model: as the client calls it.
    """

    model: str
    build_content: ContentBuilder
    metadata: ResponseMetadata
    framing: Framing = NDJSON
    pending_calls: PendingToolCalls = field(default_factory=PendingToolCalls)

    def choice_start(self, index: int) -> list[object]:
        """An answer starts with its text."""
        return []

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """New text or thinking; and calls, when they are whole."""
        calls = self.pending_calls.add(delta.tool_calls)
        if not (delta.text or delta.reasoning or calls or delta.logprobs):
            return []
        line = self._chunk(delta.text, delta.reasoning, calls)
        if delta.logprobs:
            line["logprobs"] = _logprobs(delta.logprobs)
        return [line]

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The last call."""
        calls = self.pending_calls.flush()
        return [self._chunk("", "", calls)] if calls else []

    def stream_end(self, total: Finished) -> list[object]:
        """Why it ended, and its times."""
        return [self._chunk("", "", ()) | self._final_fields(total)]

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
        """The answer in one object."""
        (choice,) = choices
        text = "".join(delta.text for delta in choice.deltas)
        thinking = "".join(delta.reasoning for delta in choice.deltas)
        line = self._chunk(text, thinking, merge_tool_call_deltas(choice.deltas))
        positions = [position for delta in choice.deltas for position in delta.logprobs]
        if positions:
            line["logprobs"] = _logprobs(positions)
        return line | self._final_fields(total)

    def _chunk(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now_timestamp()}
        return {**head, **self.build_content(text, thinking, calls), "done": False}

    def _final_fields(self, finished: Finished) -> dict[str, Any]:
        times = finished.timings
        return {
            "done": True,
            # it knows no reason of its own for calls
            "done_reason": "stop" if finished.reason == "tool_calls" else finished.reason,
            "total_duration": _ns((time.monotonic() - self.metadata.arrived_s) * 1e3),
            "load_duration": _ns(self.metadata.load_ms),
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _ns(times.prompt_ms),
            "eval_count": finished.completion_tokens,
            "eval_duration": _ns(times.predicted_ms),
            **extension_fields(finished),
        }


def _ns(ms: float) -> int:
    return round(ms * _NS_PER_MS)


def _logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    return [
        _token_logprob(position.chosen)
        | {"top_logprobs": [_token_logprob(token) for token in position.top]}
        for position in positions
    ]


def _token_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob}
