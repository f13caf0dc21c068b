"""Messages as chat templates expect them: the dicts of Hugging Face's templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from localgen.backends.types import Message, ToolCall

_SHORT_ID = 9


class _Arguments(dict[str, Any]):
    """Arguments of a call: a mapping, and JSON where a template writes them as they are."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def conversation(messages: Sequence[Message], *, short_ids: bool) -> list[dict[str, Any]]:
    """One dict a message. short_ids: ids of calls are brought to nine letters and digits."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_turn(message, names, short_ids) for message in messages]


def with_text_arguments(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of calls as JSON text."""
    return [
        turn | {"tool_calls": [_with_text(call) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]


def _turn(message: Message, names: dict[str, str], short_ids: bool) -> dict[str, Any]:
    """Only with the fields that it has: templates ask whether they are there."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, short_ids) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _id(message.tool_call_id, short_ids)
    name = message.name or names.get(message.tool_call_id or "")
    if name:
        turn["name"] = name
    return turn


def _call(call: ToolCall, short_ids: bool) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _Arguments(json.loads(call.arguments or "{}"))}
    return {"id": _id(call.id, short_ids), "type": "function", "function": function}


def _id(text: str, short_ids: bool) -> str:
    """Mistral's templates refuse ids of another length, such as other servers give."""
    if not short_ids or (len(text) == _SHORT_ID and text.isalnum() and text.isascii()):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": str(function["arguments"])}}
