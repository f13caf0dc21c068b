"""Responses in Ollama's format: NDJSON chunks, the last with durations in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from localgen.backends.types import (
    Delta,
    Finished,
    PositionLogprobs,
    PromptProgress,
    TokenLogprob,
    ToolCall,
)
from localgen.server.models.request_stream import EngineNotice, EngineSilent
from localgen.server.ollama.messages import PendingToolCalls, serialize_tool_calls
from localgen.server.openai.tools import merge_tool_call_deltas
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import (
    Framing,
    ResponseMetadata,
    encode_json,
    extension_fields,
)

API_PREFIX = "/api/"
_NS_PER_MS = 1_000_000
# (text, thinking, tool calls) -> fields of a chunk
ContentBuilder = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]


def ollama_error_body(message: str) -> dict[str, str]:
    """Build the error object."""
    return {"error": message}


class NdjsonFraming:
    """One JSON object per line. No terminator: the last object has `done: true`."""

    content_type = "application/x-ndjson"
    terminator = b""

    def encode_event(self, value: object) -> bytes:
        return encode_json(value) + b"\n"

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.encode_event(ollama_error_body(message))


NDJSON = NdjsonFraming()


def chat_content(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Build the fields of a chat chunk."""
    malformed_text, tool_calls = serialize_tool_calls(calls)
    message: dict[str, Any] = {"role": "assistant", "content": text + malformed_text}
    if thinking:
        message["thinking"] = thinking
    if tool_calls:
        message["tool_calls"] = tool_calls
    return {"message": message}


def generate_content(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Build the fields of a generate chunk, which has no tool calls."""
    assert not calls, "only chats have tools"
    return {"response": text} | ({"thinking": thinking} if thinking else {})


def now_timestamp() -> str:
    """Return the current time in Ollama's format."""
    return format_timestamp(time.time())


def format_timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def load_response(model: str, build_content: ContentBuilder, reason: str) -> dict[str, Any]:
    """Build the response to a request without a prompt. reason: `load` or `unload`."""
    head = {"model": model, "created_at": now_timestamp()}
    return {**head, **build_content("", "", ()), "done": True, "done_reason": reason}


@dataclass(slots=True)
class OllamaSerializer:
    """Serializer of /api/chat and /api/generate, with one choice.

    model: the client's name of the model.
    """

    model: str
    build_content: ContentBuilder
    metadata: ResponseMetadata
    framing: Framing = NDJSON
    pending_calls: PendingToolCalls = field(default_factory=PendingToolCalls)

    def choice_start(self, index: int) -> list[object]:
        """No events."""
        return []

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """A chunk with new text, thinking or complete tool calls."""
        calls = self.pending_calls.add(delta.tool_calls)
        if not (delta.text or delta.reasoning or calls or delta.logprobs):
            return []
        line = self._chunk(delta.text, delta.reasoning, calls)
        if delta.logprobs:
            line["logprobs"] = _logprobs(delta.logprobs)
        return [line]

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """A chunk with the last tool call, if any."""
        calls = self.pending_calls.flush()
        return [self._chunk("", "", calls)] if calls else []

    def stream_end(self, total: Finished) -> list[object]:
        """The last chunk, with the finish reason and durations."""
        return [self._chunk("", "", ()) | self._final_fields(total)]

    def keep_alive(self) -> bytes:
        """A chunk without text: NDJSON has no comments."""
        return self.framing.encode_event(self._chunk("", "", ()))

    def notice(self, notice: EngineNotice) -> bytes:
        """A chunk without text: NDJSON has no comments."""
        match notice:
            case EngineSilent(silent_s):
                fields = {"silent_s": round(silent_s, 1)}
            case PromptProgress(computed, total):
                fields = {"prompt_computed": computed, "prompt_tokens": total}
        return self.framing.encode_event(self._chunk("", "", ()) | {"localgen": fields})

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
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
            # Ollama has no finish reason for tool calls
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
