"""Input items of the Responses API, and their conversion to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message, ToolCall
from localgen.server.openai.tools import parse_arguments
from localgen.server.requests.body import StrictModel, drop_nulls
from localgen.server.requests.parts import refusal_of_part

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class ContentPart(StrictModel):
    """A part of a message or of an output. Only parts with a text are supported."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    refusal: str | None = None


class _Item(StrictModel):
    """An item of the input. id, status: of an earlier output, without effect."""

    id: str | None = None
    status: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, item: Any) -> Any:
        return drop_nulls(item)


class MessageItem(_Item):
    """A message. phase: of an earlier output, without effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    phase: str | None = None


class FunctionCallItem(_Item):
    """A call that the model made. arguments: a JSON object as text."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str = "{}"
    namespace: str | None = None


class FunctionOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]


class ReasoningItem(_Item):
    """Earlier reasoning. encrypted_content: of another provider, which only that one can read."""

    type: Literal["reasoning"]
    summary: list[ContentPart] = Field(default_factory=list)
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None


class OtherItem(StrictModel):
    """An item of another type, which is refused by name."""

    model_config = ConfigDict(extra="allow")
    type: str = ""


def _item_kind(item: Any) -> str:
    if not isinstance(item, dict):
        return str(getattr(item, "type", "other"))
    kind = item.get("type", "message")
    return kind if kind in _ITEM_KINDS else "other"


_ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_item_kind),
]


@dataclass(slots=True)
class _Answer:
    """Consecutive items that are one message of the assistant."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def to_messages(self) -> list[Message]:
        if not (self.texts or self.calls):
            return []  # reasoning that no answer followed
        text, thought = "\n".join(self.texts), "\n".join(self.thoughts)
        return [Message("assistant", text, thought or None, tuple(self.calls))]


def to_messages(items: Sequence[InputItem], earlier: Sequence[Message] = ()) -> list[Message]:
    """Convert items. Raises InvalidRequest for an item that is not supported.

    earlier: messages of the response that the items continue, to which their call ids may refer.
    """
    names = {call.id: call.name for message in earlier for call in message.tool_calls}
    messages: list[Message] = []
    answer = _Answer()
    for at, item in enumerate(items):
        place = f"input[{at}]"
        match item:
            case MessageItem(role="assistant"):
                answer.texts.append(_text(item.content, f"{place}.content"))
            case ReasoningItem():
                parts = item.content or item.summary
                answer.thoughts.append(_text(parts, f"{place}.content"))
            case FunctionCallItem():
                arguments = parse_arguments(item.arguments, f"{place}.arguments")
                name = qualified_name(item.namespace, item.name)
                answer.calls.append(ToolCall(item.call_id, name, arguments))
                names[item.call_id] = name
            case OtherItem():
                raise InvalidRequest(
                    f"{place}: item type {item.type!r} is not supported", param=place
                )
            case _:
                messages += answer.to_messages()
                answer = _Answer()
                messages.append(_input_message(item, names, place))
    return [*messages, *answer.to_messages()]


def _input_message(
    item: MessageItem | FunctionOutputItem, names: dict[str, str], place: str
) -> Message:
    if isinstance(item, FunctionOutputItem):
        text = _text(item.output, f"{place}.output")
        return Message("tool", text, tool_call_id=item.call_id, name=names.get(item.call_id))
    role = "system" if item.role == "developer" else item.role
    return Message(role, _text(item.content, f"{place}.content"))


def _text(content: str | Sequence[ContentPart], place: str) -> str:
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{place}[{at}]: {refusal_of_part(part.type)}", param=f"{place}[{at}]"
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def qualified_name(namespace: str | None, name: str) -> str:
    """The name by which the model sees a function."""
    return name if namespace is None else f"{namespace}.{name}"
