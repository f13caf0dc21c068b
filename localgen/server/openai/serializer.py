"""Responses in the format of OpenAI and llama-server."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from localgen import __version__
from localgen.backends.types import (
    Delta,
    Finished,
    PositionLogprobs,
    PromptProgress,
    TokenLogprob,
)
from localgen.server.models.request_stream import EngineNotice, EngineSilent
from localgen.server.openai import tools
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.embeddings import EmbeddingVectors
from localgen.server.requests.protocol import (
    Framing,
    ResponseMetadata,
    encode_json,
    extension_fields,
    http_status_for_code,
)


class SseFraming:
    """Server-sent events, ended by `data: [DONE]`."""

    content_type = "text/event-stream; charset=utf-8"
    terminator = b"data: [DONE]\n\n"

    def encode_event(self, value: object) -> bytes:
        return b"data: " + encode_json(value) + b"\n\n"

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.encode_event(openai_error_body(code, message, param))


SSE = SseFraming()
# another version may give another text for the same seed
SYSTEM_FINGERPRINT = f"localgen-{__version__}"

# a comment of a stream, which clients ignore
KEEP_ALIVE_COMMENT = b": computing\n\n"


def comment(notice: EngineNotice) -> bytes:
    """Encode a comment of a stream, which clients ignore unless they know it."""
    match notice:
        case EngineSilent(silent_s):
            return f": engine silent for {silent_s:.0f} s\n\n".encode()
        case PromptProgress(computed, total):
            return f": prompt {computed} of {total} tokens\n\n".encode()


def openai_error_body(
    code: str, message: str, param: str | None = None, *, status: int | None = None
) -> dict[str, Any]:
    """Build the error object. status: default is that of the error code."""
    status = status or http_status_for_code(code)
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _counts(delta: Delta) -> dict[str, int]:
    return {"num_tokens": delta.num_tokens, "prompt_tokens": delta.prompt_tokens}


def usage_fields(finished: Finished) -> dict[str, Any]:
    """Build the `usage` object."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.timings.cache_n},
    }


@dataclass(slots=True)
class ChatCompletionSerializer:
    """Serializer of /v1/chat/completions."""

    id: str
    model: str
    created: int
    include_usage: bool
    framing: Framing = SSE

    @classmethod
    def from_metadata(
        cls, metadata: ResponseMetadata, *, include_usage: bool
    ) -> ChatCompletionSerializer:
        return cls(f"chatcmpl-{metadata.id}", metadata.model, int(time.time()), include_usage)

    def choice_start(self, index: int) -> list[object]:
        """The first chunk, with the role."""
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """A chunk with new text, reasoning or tool calls."""
        chunk = self._chunk(index, _delta_fields(delta))
        if delta.logprobs:
            chunk["choices"][0]["logprobs"] = _chat_logprobs(delta.logprobs)
        chunk["localgen"] = _counts(delta)
        return [chunk]

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The last chunk of a choice, with the finish reason and timings."""
        return [self._chunk(index, {}, finished.reason) | extension_fields(finished)]

    def stream_end(self, total: Finished) -> list[object]:
        """The usage chunk, if requested by `stream_options.include_usage`."""
        head = self._head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": usage_fields(total)}] if self.include_usage else []

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE_COMMENT

    def notice(self, notice: EngineNotice) -> bytes:
        return comment(notice)

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_fields(total),
            **extension_fields(total),
        }

    def _choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        positions = _all_logprobs(choice.deltas)
        return {
            "index": index,
            "message": _assistant_message(choice.deltas),
            "logprobs": _chat_logprobs(positions) if positions else None,
            "finish_reason": choice.finished.reason,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": SYSTEM_FINGERPRINT}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


@dataclass(slots=True)
class CompletionSerializer:
    """Serializer of /v1/completions. text_offsets: characters sent so far, by choice index."""

    id: str
    model: str
    created: int
    include_usage: bool
    framing: Framing = SSE
    text_offsets: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_metadata(
        cls, metadata: ResponseMetadata, *, include_usage: bool
    ) -> CompletionSerializer:
        return cls(f"cmpl-{metadata.id}", metadata.model, int(time.time()), include_usage)

    def choice_start(self, index: int) -> list[object]:
        """No events: completions have no role."""
        return []

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """A chunk with new text."""
        choice = self._choice(index, delta.text, self._logprobs(index, delta.logprobs), None)
        return [{**self._body([choice]), "localgen": _counts(delta)}]

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The last chunk of a choice, with the finish reason and timings."""
        return [
            self._body([self._choice(index, "", None, finished.reason)])
            | extension_fields(finished)
        ]

    def stream_end(self, total: Finished) -> list[object]:
        """The usage chunk, if requested by `stream_options.include_usage`."""
        return [{**self._body([]), "usage": usage_fields(total)}] if self.include_usage else []

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE_COMMENT

    def notice(self, notice: EngineNotice) -> bytes:
        return comment(notice)

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
        printed = [
            self._choice(
                index,
                _joined_text(choice.deltas),
                self._logprobs(index, _all_logprobs(choice.deltas)),
                choice.finished.reason,
            )
            for index, choice in enumerate(choices)
        ]
        return {**self._body(printed), "usage": usage_fields(total), **extension_fields(total)}

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        if not positions:
            return None
        offsets = []
        for position in positions:
            offsets.append(self.text_offsets[index])
            self.text_offsets[index] += len(position.chosen.text)
        return {
            "tokens": [position.chosen.text for position in positions],
            "token_logprobs": [
                None if position.is_first else position.chosen.logprob for position in positions
            ],
            "top_logprobs": [_top_logprobs(position) for position in positions],
            "text_offset": offsets,
        }


def _top_logprobs(position: PositionLogprobs) -> dict[str, float] | None:
    """Logprobs of the most likely tokens and the token itself, as at OpenAI, by text.

    Of tokens with the same text the best. None: of the first token of a prompt.
    """
    if position.is_first:
        return None
    best: dict[str, float] = {}
    for token in (*position.top, position.chosen):
        best.setdefault(token.text, token.logprob)
    return best


def _delta_fields(delta: Delta) -> dict[str, Any]:
    """Build the `delta` object of a chunk."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = [tools.tool_call_delta_fields(part) for part in delta.tool_calls]
    if delta.text or not fields:
        fields["content"] = delta.text
    return fields


def _assistant_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Build the complete message. content is null if it has only tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": _joined_text(deltas)}
    reasoning = "".join(delta.reasoning for delta in deltas)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = tools.merge_tool_call_deltas(deltas)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [tools.tool_call_fields(call) for call in calls]
    return message


def _joined_text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _all_logprobs(deltas: Iterable[Delta]) -> list[PositionLogprobs]:
    return [position for delta in deltas for position in delta.logprobs]


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    content = [
        {
            **_token_logprob(position.chosen),
            "top_logprobs": [_token_logprob(token) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _token_logprob(token: TokenLogprob) -> dict[str, Any]:
    # an incomplete character shows as U+FFFD, whose bytes are not those of the token
    whole = "\ufffd" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if whole else None,
    }


def embedding_list_body(vectors: EmbeddingVectors, *, as_base64: bool) -> dict[str, Any]:
    """Build the response of /v1/embeddings. as_base64: encode as little-endian float32."""
    rows = vectors.to_array()
    shown: list[Any]
    shown = [base64.b64encode(r.tobytes()).decode() for r in rows] if as_base64 else rows.tolist()
    tokens = vectors.num_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(shown)
        ],
        "model": vectors.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "timings": vectors.output.timings,
    }
