"""Tools for chat templates without tool support: described in the system message, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localgen.backends.text.tool_format import ToolCallFormat, parse_parameters
from localgen.backends.types import Message, Tool

_TOOL_INSTRUCTIONS = """\
You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments within tags, and nothing else:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"NAME": "VALUE"}}}}
</tool_call>
The result is returned within <tool_response></tool_response>."""


def tool_definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format, which templates use."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": parse_parameters(tool),
            },
        }
        for tool in tools
    ]


def tool_instructions(tools: Sequence[Tool]) -> str:
    """Return the instructions for a model without its own tool call format."""
    lines = [json.dumps(one["function"], ensure_ascii=False) for one in tool_definitions(tools)]
    return _TOOL_INSTRUCTIONS.format(tools="\n".join(lines))


def append_to_system_message(messages: Sequence[Message], text: str) -> list[Message]:
    """Append text to the system message, or add one."""
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{text}".strip())
        return [first, *messages[1:]]
    return [Message("system", text), *messages]


def merge_system_into_user(messages: Sequence[Message]) -> list[Message]:
    """Merge the system message into the first user message, for templates without one."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return list(messages)
    content = f"{messages[0].content}\n\n{messages[1].content}"
    return [replace(messages[1], content=content), *messages[2:]]


def inline_tool_messages(messages: Sequence[Message], format: ToolCallFormat) -> list[Message]:
    """Return the messages with calls and tool results as content, without the tool role.

    Consecutive tool results and a user message after them are merged: templates often require
    alternating roles.
    """
    plain: list[Message] = []
    for message in messages:
        turn = _inline_message(message, format)
        if message.role == "tool" or (plain and turn.role == plain[-1].role == "user"):
            turn = _merge_same_role(plain, turn)
        plain.append(turn)
    return plain


def inline_tool_calls(message: Message, format: ToolCallFormat) -> Message:
    """Append the calls of a message to its content."""
    if not message.tool_calls:
        return message
    calls = format.render_calls(message.tool_calls)
    return replace(message, content=f"{message.content}\n{calls}".strip(), tool_calls=())


def _inline_message(message: Message, format: ToolCallFormat) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    return inline_tool_calls(message, format)


def _merge_same_role(messages: list[Message], turn: Message) -> Message:
    if not messages or messages[-1].role != turn.role:
        return turn
    return replace(turn, content=f"{messages.pop().content}\n{turn.content}")
