"""Messages, tools and calls of Ollama's protocol, from ours and to ours.

Its calls have arguments as objects, ours as the JSON text that the model wrote; and its results of
tools name the function, where ours name the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from localgen.backends.types import Message, ToolCall, ToolCallDelta
from localgen.server.openai.tools import FunctionTool
from localgen.server.requests.body import StrictModel, reject_unsupported_fields


class OllamaTool(FunctionTool):
    """An entry of `tools`, which need not say that it is a function."""

    type: Literal["function"] = "function"


class OllamaFunctionCall(StrictModel):
    """A call as it stands in a message. index: which of the message's calls, they say it twice."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaToolCall(StrictModel):
    """An entry of a message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunctionCall


class OllamaChatMessage(StrictModel):
    """One turn. tool_name, tool_call_id: which function, or call of it, the content is from."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, message: Any) -> Any:
        return reject_unsupported_fields(message, {"images": ([],)})


def from_ollama_messages(messages: Sequence[OllamaChatMessage]) -> tuple[Message, ...]:
    """Ours. A result belongs to the first call without one, of its function if it names one."""
    made: list[Message] = []
    waiting: list[ToolCall] = []
    for message in messages:
        calls = _with_ids(message.tool_calls or (), len(made))
        waiting += calls
        answered = _pop_answered_call(message, waiting) if message.role == "tool" else None
        made.append(
            Message(
                role=message.role,
                content=message.content,
                reasoning=message.thinking or None,
                tool_calls=calls,
                tool_call_id=message.tool_call_id or (answered.id if answered else None),
                name=message.tool_name or (answered.name if answered else None),
            )
        )
    return tuple(made)


def _with_ids(calls: Iterable[OllamaToolCall], message_index: int) -> tuple[ToolCall, ...]:
    # some templates want nine letters or digits
    return tuple(
        ToolCall(
            call.id or f"call{message_index:03d}{number:02d}",
            call.function.name,
            json.dumps(call.function.arguments),
        )
        for number, call in enumerate(calls)
    )


def _pop_answered_call(result: OllamaChatMessage, unanswered: list[ToolCall]) -> ToolCall | None:
    """The call that a result is of, which then no longer waits for one."""
    for call in unanswered:
        if result.tool_call_id in (None, call.id) and result.tool_name in (None, call.name):
            unanswered.remove(call)
            return call
    return None


class PendingToolCalls:
    """Calls that come in pieces: Ollama's clients get them whole."""

    def __init__(self) -> None:
        self._calls: list[ToolCall] = []

    def add(self, deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
        """The calls that are whole with this: a later one has begun."""
        for piece in deltas:
            if piece.name is not None:
                self._calls.append(ToolCall(piece.id or "", piece.name, piece.arguments))
            else:
                last = self._calls[-1]
                self._calls[-1] = ToolCall(last.id, last.name, last.arguments + piece.arguments)
        whole, self._calls = self._calls[:-1], self._calls[-1:]
        return whole

    def flush(self) -> list[ToolCall]:
        """The last one, as far as it got."""
        rest, self._calls = self._calls, []
        return rest


def serialize_tool_calls(calls: Sequence[ToolCall]) -> tuple[str, list[dict[str, Any]]]:
    """Calls as a message has them; and as text what was cut off before it was an object."""
    cut, made = "", []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            function = {"name": call.name, "arguments": arguments}
            made.append({"id": call.id, "function": function})
        else:
            cut += f"{call.name} {call.arguments}"
    return cut, made
