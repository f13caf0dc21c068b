"""Conversion of Anthropic's messages, content blocks and tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message, Tool, ToolCall
from localgen.server.openai.tools import require_tool_names
from localgen.server.requests.body import StrictModel, drop_fields, drop_nulls
from localgen.server.requests.parts import refusal_of_part

# marks where Anthropic may cache, and what an answer was written from: neither changes a token
_HARMLESS = ("cache_control", "citations", "caller")
# longer than OpenAI's: agents put the names of servers and plugins before those of tools
_MAX_NAME_CHARS = 128
# blocks of one message are paragraphs
_BLOCK_SEPARATOR = "\n"


class _Block(StrictModel):
    """A content block. Fields that are null or do not change a token are dropped."""

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, block: Any) -> Any:
        return drop_fields(drop_nulls(block), _HARMLESS)


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """Earlier reasoning. signature: ignored, reasoning is not encrypted here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block):
    """Reasoning of another provider, which only that one can read: left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(_Block):
    """A tool call in an assistant message."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResultBlock(_Block):
    """The result of a tool call in a user message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ContentBlock] = ""
    is_error: bool = False


class OtherBlock(StrictModel):
    """A block of another type, such as an image, which is refused by name."""

    model_config = ConfigDict(extra="allow")
    type: str = ""


def _block_kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in _BLOCK_KINDS else "other"


_BLOCK_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_block_kind),
]


class AnthropicMessage(StrictModel):
    """A message: text, or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(_Block):
    """A tool that the client runs. strict: ignored, arguments are always constrained."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_server_tools(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise InvalidRequest(
                f"tools: {kind} is a tool of Anthropic's servers, which this server does not have: "
                "leave it out",
                param="tools",
            )
        return tool


def parse_anthropic_tools(tools: Sequence[AnthropicTool]) -> tuple[Tool, ...]:
    """Convert tools. Raises InvalidRequest as require_tool_names."""
    require_tool_names([tool.name for tool in tools], "tools[{}].name", _MAX_NAME_CHARS)
    return tuple(
        Tool(tool.name, tool.description, json.dumps(tool.input_schema, ensure_ascii=False))
        for tool in tools
    )


def to_system_text(system: str | Sequence[TextBlock] | None) -> str:
    """Text of the `system` field; empty without one."""
    if system is None or isinstance(system, str):
        return system or ""
    return _BLOCK_SEPARATOR.join(block.text for block in system)


def to_messages(messages: Sequence[AnthropicMessage]) -> tuple[Message, ...]:
    """Convert messages. Raises InvalidRequest for a block that is not valid at its place.

    Tool results become messages of role `tool`, in their order among the texts of a user.
    """
    converted: list[Message] = []
    function_names: dict[str, str] = {}
    for at, message in enumerate(messages):
        place = f"messages[{at}].content"
        if isinstance(message.content, str):
            converted.append(Message(message.role, message.content))
        elif message.role == "assistant":
            converted.append(_assistant_message(message.content, place))
            function_names |= {call.id: call.name for call in converted[-1].tool_calls}
        else:
            converted += _user_messages(message, function_names, place)
    return tuple(converted)


def _assistant_message(blocks: Sequence[ContentBlock], place: str) -> Message:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(block.id, block.name, arguments))
            case _:
                raise _wrong_block(block, f"{place}[{at}]", "assistant")
    return Message(
        "assistant",
        _BLOCK_SEPARATOR.join(texts),
        _BLOCK_SEPARATOR.join(thoughts) or None,
        tuple(calls),
    )


def _user_messages(
    message: AnthropicMessage, function_names: dict[str, str], place: str
) -> list[Message]:
    converted: list[Message] = []
    texts: list[str] = []
    for at, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock() if message.role == "user":
                if texts:
                    converted.append(Message(message.role, _BLOCK_SEPARATOR.join(texts)))
                    texts = []
                name = function_names.get(block.tool_use_id)
                text = _result_text(block, f"{place}[{at}]")
                converted.append(Message("tool", text, tool_call_id=block.tool_use_id, name=name))
            case _:
                raise _wrong_block(block, f"{place}[{at}]", message.role)
    if texts or not converted:
        converted.append(Message(message.role, _BLOCK_SEPARATOR.join(texts)))
    return converted


def _result_text(block: ToolResultBlock, place: str) -> str:
    if isinstance(block.content, str):
        text = block.content
    else:
        texts = []
        for at, part in enumerate(block.content):
            if not isinstance(part, TextBlock):
                raise _wrong_block(part, f"{place}.content[{at}]", "tool_result")
            texts.append(part.text)
        text = _BLOCK_SEPARATOR.join(texts)
    # templates have no place for the flag, so the model reads it
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def _wrong_block(block: Any, place: str, role: str) -> InvalidRequest:
    if isinstance(block, OtherBlock):
        reason = refusal_of_part(block.type)
    else:
        reason = f"a {block.type} block is not valid in a message of {role}"
    return InvalidRequest(f"{place}: {reason}", param=place)
