"""Answers as OpenAI's servers and llama-server print them. Plain dicts, encoded by msgspec."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from localgen.backends.errors import LocalgenError
from localgen.backends.types import Delta, Finished, PositionLogprobs, TokenLogprob
from localgen.server import tools

DONE = b"data: [DONE]\n\n"

# codes of LocalgenError to HTTP status; anything else is our fault: 500
STATUS_OF_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "bad_setting": 400,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "model_busy": 409,
    "queue_full": 429,
    "load_failed": 500,
    "engine_died": 502,
    "server_unavailable": 503,
    "timeout": 504,
    "out_of_memory": 507,
    "hub_unavailable": 503,
    "access_denied": 403,
    "disk_full": 507,
    "download_failed": 502,
}

encode = msgspec.json.Encoder().encode


def sse(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def error_body(
    code: str, message: str, param: str | None = None, *, status: int | None = None
) -> dict[str, Any]:
    """The error object that every failed request gets. status: that of the code by default."""
    status = status or STATUS_OF_CODE.get(code, 500)
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: LocalgenError) -> dict[str, Any]:
    """The error object of one of our errors."""
    return error_body(error.code, error.message, error.param)


def usage(end: Finished) -> dict[str, Any]:
    """Tokens of the prompt, of these from the cache, and of the answer."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.timings.cache_n},
    }


def extras(end: Finished) -> dict[str, Any]:
    """What we add to a finished answer: times, and how it was served."""
    return {
        "timings": end.timings,
        "localgen": {"ctx": end.ctx, "seed": end.seed, "stop": end.stop, "notes": end.notes},
    }


@dataclass(slots=True)
class ChatFormat:
    """Objects of /v1/chat/completions for one request."""

    id: str
    model: str
    created: int

    @classmethod
    def of(cls, request_id: str, model: str) -> ChatFormat:
        return cls(f"chatcmpl-{request_id}", model, int(time.time()))

    def opening(self) -> list[bytes]:
        """What a stream starts with: who speaks."""
        return [sse(self._chunk({"role": "assistant", "content": ""}, None))]

    def delta(self, delta: Delta) -> bytes:
        """The event of new text."""
        chunk = self._chunk(_delta_fields(delta), None)
        if delta.logprobs:
            chunk["choices"][0]["logprobs"] = _chat_logprobs(delta.logprobs)
        chunk["localgen"] = {"num_tokens": delta.num_tokens}
        return sse(chunk)

    def closing(self, end: Finished, *, include_usage: bool) -> list[bytes]:
        """The last events of a stream."""
        events = [sse(self._chunk({}, end.reason) | extras(end))]
        if include_usage:
            events.append(
                sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(end)})
            )
        return [*events, DONE]

    def whole(self, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        """The answer in one object."""
        positions = _positions(deltas)
        choice = {
            "index": 0,
            "message": _message(deltas),
            "logprobs": _chat_logprobs(positions) if positions else None,
            "finish_reason": end.reason,
        }
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": usage(end), **extras(end)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


@dataclass(slots=True)
class CompletionFormat:
    """Objects of /v1/completions for one request. offset: characters sent so far."""

    id: str
    model: str
    created: int
    offset: int = 0

    @classmethod
    def of(cls, request_id: str, model: str) -> CompletionFormat:
        return cls(f"cmpl-{request_id}", model, int(time.time()))

    def opening(self) -> list[bytes]:
        """A completion starts with its text."""
        return []

    def delta(self, delta: Delta) -> bytes:
        """The event of new text."""
        chunk = self._chunk(delta.text, self._logprobs(delta.logprobs), None)
        chunk["localgen"] = {"num_tokens": delta.num_tokens}
        return sse(chunk)

    def closing(self, end: Finished, *, include_usage: bool) -> list[bytes]:
        """The last events of a stream."""
        events = [sse(self._chunk("", None, end.reason) | extras(end))]
        if include_usage:
            events.append(sse({**self._head(), "choices": [], "usage": usage(end)}))
        return [*events, DONE]

    def whole(self, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        """The answer in one object."""
        logprobs = self._logprobs(_positions(deltas))
        answer = self._chunk(_text(deltas), logprobs, end.reason)
        return {**answer, "usage": usage(end), **extras(end)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**self._head(), "choices": [choice]}

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if not positions:
            return None
        offsets = []
        for position in positions:
            offsets.append(self.offset)
            self.offset += len(position.chosen.text)
        return {
            "tokens": [position.chosen.text for position in positions],
            "token_logprobs": [position.chosen.logprob for position in positions],
            "top_logprobs": [
                {token.text: token.logprob for token in position.top} for position in positions
            ],
            "text_offset": offsets,
        }


Format = ChatFormat | CompletionFormat


def _delta_fields(delta: Delta) -> dict[str, Any]:
    """What is new of a message, in a stream."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = [tools.delta_fields(part) for part in delta.tool_calls]
    if delta.text or not fields:
        fields["content"] = delta.text
    return fields


def _message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The whole message; its content is null where it only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(deltas)}
    reasoning = "".join(delta.reasoning for delta in deltas)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = tools.whole_calls(deltas)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [tools.call_fields(call) for call in calls]
    return message


def _text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _positions(deltas: Iterable[Delta]) -> list[PositionLogprobs]:
    return [position for delta in deltas for position in delta.logprobs]


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    content = [
        {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    # a part of a character shows as a replacement, whose bytes are not the token's
    whole = "\ufffd" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if whole else None,
    }
