"""Conversion of Ollama messages, tools and tool calls.

Ollama has tool call arguments as objects, localgen as the JSON text that the model wrote. Ollama's
tool results name the function, localgen's name the call id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from localgen.backends.types import Message, ToolCall, ToolCallDelta
from localgen.server.openai.tools import FunctionTool
from localgen.server.requests.body import StrictModel, reject_unsupported_fields
from localgen.server.requests.parts import reject_images


class OllamaTool(FunctionTool):
    """An entry of `tools`. The type is optional."""

    type: Literal["function"] = "function"


class OllamaFunctionCall(StrictModel):
    """A tool call in a message. index: ignored, the order of the calls is used."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaToolCall(StrictModel):
    """An entry of a message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunctionCall


class OllamaChatMessage(StrictModel):
    """A chat message. tool_name, tool_call_id: the function or call that a result belongs to."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, message: Any) -> Any:
        return reject_unsupported_fields(reject_images(message), {"images": ([],)})


def from_ollama_messages(messages: Sequence[OllamaChatMessage]) -> tuple[Message, ...]:
    """Convert messages. A tool result is assigned to the first matching call without a result."""
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
    # some chat templates require ids of nine alphanumeric characters
    return tuple(
        ToolCall(
            call.id or f"call{message_index:03d}{number:02d}",
            call.function.name,
            json.dumps(call.function.arguments),
        )
        for number, call in enumerate(calls)
    )


def _pop_answered_call(result: OllamaChatMessage, unanswered: list[ToolCall]) -> ToolCall | None:
    """Remove and return the first call that matches a tool result, or None."""
    for call in unanswered:
        if result.tool_call_id in (None, call.id) and result.tool_name in (None, call.name):
            unanswered.remove(call)
            return call
    return None


class PendingToolCalls:
    """Assembles tool call deltas: Ollama clients get complete calls only."""

    def __init__(self) -> None:
        self._calls: list[ToolCall] = []

    def add(self, deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
        """Add deltas. Returns the calls that are now complete: those before the latest."""
        for piece in deltas:
            if piece.name is not None:
                self._calls.append(ToolCall(piece.id or "", piece.name, piece.arguments))
            else:
                last = self._calls[-1]
                self._calls[-1] = ToolCall(last.id, last.name, last.arguments + piece.arguments)
        whole, self._calls = self._calls[:-1], self._calls[-1:]
        return whole

    def flush(self) -> list[ToolCall]:
        """Return the latest call, which may be incomplete."""
        rest, self._calls = self._calls, []
        return rest


def serialize_tool_calls(calls: Sequence[ToolCall]) -> tuple[str, list[dict[str, Any]]]:
    """Return (text, calls): calls whose arguments are no JSON object are returned as text."""
    cut, made = "", []
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function = {"name": call.name, "arguments": arguments}
            made.append({"id": call.id, "function": function})
        else:
            cut += f"{call.name} {call.arguments}"
    return cut, made
