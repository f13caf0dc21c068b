"""Responses in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.types import Delta, Finished, Tokenized
from localgen.server.models.request_stream import EngineNotice
from localgen.server.openai.tools import merge_tool_call_deltas
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import (
    Framing,
    ResponseMetadata,
    encode_named_event,
    extension_fields,
    http_status_for_code,
)

PATH = "/v1/messages"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(code: str, message: str, *, status: int | None = None) -> dict[str, Any]:
    """Build the error object. status: default is that of the error code."""
    status = status or http_status_for_code(code)
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(status, kind), "message": message},
    }


class EventFraming:
    """Server-sent events with names. No terminator: message_stop is the last event."""

    content_type = "text/event-stream; charset=utf-8"
    terminator = b""

    encode_event = staticmethod(encode_named_event)

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.encode_event(anthropic_error_body(code, message))


EVENTS = EventFraming()


@dataclass(slots=True)
class MessageSerializer:
    """Serializer of /v1/messages.

    max_tokens, stop_sequences: of the request, which name the reason of the end. num_blocks: of
    the stream so far; open_block: type of the last one, or the index of its tool call, while it
    can grow.
    """

    id: str
    model: str
    max_tokens: int
    stop_sequences: Sequence[str]
    framing: Framing = EVENTS
    num_blocks: int = 0
    open_block: str | int | None = field(default=None)

    @classmethod
    def from_metadata(
        cls, metadata: ResponseMetadata, *, max_tokens: int, stop_sequences: Sequence[str]
    ) -> MessageSerializer:
        return cls(f"msg_{metadata.id}", metadata.model, max_tokens, stop_sequences)

    def choice_start(self, index: int) -> list[object]:
        """The message without content. Its tokens are counted in the last event."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        return [{"type": "message_start", "message": {**self._head(), "usage": usage}}]

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """Events for new reasoning, text and tool calls, in this order."""
        events: list[object] = []
        if delta.reasoning:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._enter("thinking", start)
            events.append(self._delta("thinking_delta", thinking=delta.reasoning))
        if delta.text:
            events += self._enter("text", {"type": "text", "text": ""})
            events.append(self._delta("text_delta", text=delta.text))
        for call in delta.tool_calls:
            begun: dict[str, Any] = {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": {},
            }
            events += self._enter(call.index, begun)
            if call.arguments:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The end of the last block."""
        return self._close()

    def stream_end(self, total: Finished) -> list[object]:
        """The reason of the end and the usage."""
        ended = {"type": "message_delta", "delta": self._end_fields(total)}
        return [
            {**ended, "usage": usage_fields(total), **extension_fields(total)},
            {"type": "message_stop"},
        ]

    def keep_alive(self) -> bytes:
        return self.framing.encode_event({"type": "ping"})

    def notice(self, notice: EngineNotice) -> bytes:
        return self.keep_alive()

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
        (choice,) = choices
        return {
            **self._head(),
            "content": _content_blocks(choice.deltas),
            **self._end_fields(total),
            "usage": usage_fields(total),
            **extension_fields(total),
        }

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _enter(self, block: str | int, start: dict[str, Any]) -> list[object]:
        """Events that begin a block, if it is another than the open one."""
        if block == self.open_block:
            return []
        events = self._close()
        self.open_block = block
        self.num_blocks += 1
        index = self.num_blocks - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": start}]

    def _close(self) -> list[object]:
        if self.open_block is None:
            return []
        self.open_block = None
        return [{"type": "content_block_stop", "index": self.num_blocks - 1}]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        index = self.num_blocks - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}

    def _end_fields(self, finished: Finished) -> dict[str, str | None]:
        stop = finished.stop if finished.stop in self.stop_sequences else None
        return {"stop_reason": self._stop_reason(finished, stop), "stop_sequence": stop}

    def _stop_reason(self, finished: Finished, stop: str | None) -> str:
        match finished.reason:
            case "tool_calls":
                return "tool_use"
            case "length" if finished.completion_tokens < self.max_tokens:
                return "model_context_window_exceeded"
            case "length":
                return "max_tokens"
            case "cancelled":  # the client may send the answer back, and the model continues it
                return "pause_turn"
            case _:
                return "end_turn" if stop is None else "stop_sequence"


def usage_fields(finished: Finished) -> dict[str, int]:
    """Build the `usage` object; input_tokens does not include those read from the cache."""
    cached = finished.timings.cache_n
    return {
        "input_tokens": finished.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": finished.completion_tokens,
    }


def count_body(tokenized: Tokenized) -> dict[str, int]:
    """Build the response of /v1/messages/count_tokens."""
    return {"input_tokens": len(tokenized.tokens)}


def _content_blocks(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    reasoning = "".join(delta.reasoning for delta in deltas)
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    text = "".join(delta.text for delta in deltas)
    if text:
        blocks.append({"type": "text", "text": text})
    for call in merge_tool_call_deltas(deltas):
        arguments = _parse_arguments(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; empty if max_tokens cut them."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
