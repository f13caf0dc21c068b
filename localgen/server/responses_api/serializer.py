"""Responses of the Responses API: one object, or a stream of typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localgen.backends.types import Delta, Finished, Message
from localgen.server.models.request_stream import EngineNotice
from localgen.server.openai.serializer import KEEP_ALIVE_COMMENT, comment
from localgen.server.openai.tools import merge_tool_call_deltas, parse_arguments
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import (
    Framing,
    ResponseMetadata,
    encode_named_event,
    extension_fields,
)

PATH = "/v1/responses"
_ID_PREFIX = "resp_"
# a message and a reasoning item have one part
_PART: Mapping[str, Any] = {"content_index": 0}
_NONE: Mapping[str, Any] = {}
# gets the answer and the whole response, when it is complete
OnComplete = Callable[[Message, dict[str, Any]], None]


class TypedEventFraming:
    """Server-sent events with names. No terminator: the last event says how the response ended."""

    content_type = "text/event-stream; charset=utf-8"
    terminator = b""
    encode_event = staticmethod(encode_named_event)

    def __init__(self, fail: Callable[[str, str], dict[str, Any]]) -> None:
        self._fail = fail

    def encode_error(self, code: str, message: str, param: str | None = None) -> bytes:
        """The event of a failed response: clients that see none send the request again."""
        return self.encode_event(self._fail(code, message))


@dataclass(slots=True)
class _OpenItem:
    """An item of the output that grows. key: `reasoning`, `message` or the index of a call."""

    key: str | int
    item: dict[str, Any]
    text: str = ""


@dataclass(slots=True)
class ResponsesSerializer:
    """Serializer of /v1/responses.

    echo: fields of the request that a response repeats. namespaces: namespace and name of each
    function in one, by the name that the model sees. items: complete items of the output.
    deltas: of the answer so far.
    """

    id: str
    model: str
    created_at: int
    echo: dict[str, Any]
    on_complete: OnComplete
    namespaces: Mapping[str, tuple[str, str]]
    items: list[dict[str, Any]] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    _open: _OpenItem | None = None
    _num_events: int = 0

    @classmethod
    def from_metadata(
        cls,
        metadata: ResponseMetadata,
        *,
        response_id: str,
        echo: dict[str, Any],
        on_complete: OnComplete,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> ResponsesSerializer:
        created = int(time.time())
        return cls(response_id, metadata.model, created, echo, on_complete, namespaces)

    @property
    def framing(self) -> Framing:
        return TypedEventFraming(self._failed_event)

    def _failed_event(self, code: str, message: str) -> dict[str, Any]:
        body = self._body("failed") | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=body)

    def choice_start(self, index: int) -> list[object]:
        """The response without output."""
        response = self._body("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """Events for new reasoning, text and calls, in this order."""
        self.deltas.append(delta)
        events: list[object] = []
        if delta.reasoning:
            events += self._enter("reasoning", "rs", type="reasoning", summary=[], content=[])
            events.append(self._grow("response.reasoning_text.delta", delta.reasoning, _PART))
        if delta.text:
            fields: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
            events += self._enter("message", "msg", **fields)
            more = {**_PART, "logprobs": []}
            events.append(self._grow("response.output_text.delta", delta.text, more))
        for call in delta.tool_calls:
            named = {"call_id": call.id, **self._name_fields(call.name or ""), "arguments": ""}
            events += self._enter(call.index, "fc", type="function_call", **named)
            if call.arguments:
                kind = "response.function_call_arguments.delta"
                events.append(self._grow(kind, call.arguments))
        return events

    def _name_fields(self, name: str) -> dict[str, str]:
        if name not in self.namespaces:
            return {"name": name}
        namespace, own_name = self.namespaces[name]
        return {"name": own_name, "namespace": namespace}

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The end of the last item."""
        is_whole = finished.reason in ("stop", "tool_calls")
        return self._close("completed" if is_whole else "incomplete")

    def stream_end(self, total: Finished) -> list[object]:
        """The whole response."""
        response = self._final_body(total)
        return [self._event(f"response.{response['status']}", response=response)]

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE_COMMENT

    def notice(self, notice: EngineNotice) -> bytes:
        return comment(notice)

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> dict[str, Any]:
        (choice,) = choices
        for delta in choice.deltas:
            self.choice_delta(0, delta)
        self.choice_end(0, choice.finished)
        return self._final_body(total)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        index = len(self.items)
        return self._event(kind, item_id=self._open.item["id"], output_index=index, **fields)

    def _enter(self, key: str | int, prefix: str, **fields: Any) -> list[object]:
        """Events that begin an item, if it is another than the open one."""
        if self._open is not None and self._open.key == key:
            return []
        events = self._close("completed")
        index = len(self.items)
        item_id = f"{prefix}_{self.id.removeprefix(_ID_PREFIX)}_{index}"
        item = {"id": item_id, "status": "in_progress", **fields}
        self._open = _OpenItem(key, item)
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if key == "message":
            part = _text_part("")
            events.append(self._item_event("response.content_part.added", part=part, **_PART))
        return events

    def _grow(self, kind: str, text: str, fields: Mapping[str, Any] = _NONE) -> dict[str, Any]:
        assert self._open is not None
        self._open.text += text
        return self._item_event(kind, delta=text, **fields)

    def _close(self, status: str) -> list[object]:
        if self._open is None:
            return []
        text, item = self._open.text, self._open.item | {"status": status}
        events: list[object]
        match item["type"]:
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                events = [self._item_event("response.reasoning_text.done", text=text, **_PART)]
            case "message":
                item["content"] = [part] = [_text_part(text)]
                done = {"text": text, "logprobs": [], **_PART}
                events = [
                    self._item_event("response.output_text.done", **done),
                    self._item_event("response.content_part.done", part=part, **_PART),
                ]
            case _:
                item["arguments"] = text
                done = {"arguments": text, "name": item["name"]}
                events = [self._item_event("response.function_call_arguments.done", **done)]
        index = len(self.items)
        self.items.append(item)
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": self.items,
            "usage": None,
            **self.echo,
        }

    def _final_body(self, total: Finished) -> dict[str, Any]:
        is_whole = total.reason in ("stop", "tool_calls")
        body = self._body("completed" if is_whole else "incomplete")
        if not is_whole:
            reason = "max_output_tokens" if total.reason == "length" else total.reason
            body["incomplete_details"] = {"reason": reason}
        body |= {"usage": _usage(self.deltas, total)} | extension_fields(total)
        self.on_complete(_answer(self.deltas), body)
        return body


def new_response_id() -> str:
    """Return a random id. That of the request is in statistics, and who knows an id may read it."""
    return _ID_PREFIX + secrets.token_hex(16)


def _answer(deltas: Sequence[Delta]) -> Message:
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = tuple(
        replace(call, arguments=parse_arguments(call.arguments, "arguments"))
        for call in merge_tool_call_deltas(deltas)
    )
    text = "".join(delta.text for delta in deltas)
    return Message("assistant", text, reasoning or None, calls)


def _usage(deltas: Sequence[Delta], total: Finished) -> dict[str, Any]:
    # the tokens up to the last reasoning
    thought = max((delta.num_tokens for delta in deltas if delta.reasoning), default=0)
    return {
        "input_tokens": total.prompt_tokens,
        "input_tokens_details": {"cached_tokens": total.timings.cache_n},
        "output_tokens": total.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": total.prompt_tokens + total.completion_tokens,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
