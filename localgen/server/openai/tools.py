"""Tools and calls as OpenAI's protocol has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Delta, Tool, ToolCall, ToolCallDelta
from localgen.server.requests.body import StrictModel

MAX_TOOLS = 256
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_TOOL_CHOICE_MODES = ("auto", "none", "required")


class FunctionDefinition(StrictModel):
    """strict is for other servers: arguments are always held to their schema here."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    """A tool; functions are the only kind there is."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(StrictModel):
    """What was called. arguments: a JSON object as text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(StrictModel):
    """A call in a message of the assistant. index: clients that keep stream deltas send it."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


def parse_tools(function_tools: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    """The tools of a request. InvalidRequest names the one that is wrong."""
    if len(function_tools) > MAX_TOOLS:
        raise InvalidRequest(f"more than {MAX_TOOLS} tools", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(function_tools):
        name, param = tool.function.name, f"tools[{at}].function.name"
        if not _FUNCTION_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{param} {name!r}: give 1 to 64 letters, digits, _, - or .", param=param
            )
        if name in names:
            raise InvalidRequest(f"{param}: there are two tools {name}", param=param)
        names.add(name)
    return tuple(_to_tool(tool.function) for tool in function_tools)


def _to_tool(function: FunctionDefinition) -> Tool:
    description = function.description or ""
    if not function.parameters:
        return Tool(function.name, description)
    return Tool(function.name, description, json.dumps(function.parameters, ensure_ascii=False))


def parse_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> str:
    """auto, none, required or the name of a tool. InvalidRequest: none of them."""
    if choice is None:
        return "auto"
    name = _named_function(choice)
    if name is None and choice not in _TOOL_CHOICE_MODES:
        raise InvalidRequest(
            f"tool_choice: give {', '.join(_TOOL_CHOICE_MODES)}, or "
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    if name is not None and name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(
            f"tool_choice: there is no tool {name!r} among those given ({known})",
            param="tool_choice",
        )
    return str(choice) if name is None else name


def _named_function(choice: str | dict[str, Any]) -> str | None:
    """The function that is to be called; None: the choice is not of that form."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def parse_tool_calls(tool_calls: Iterable[MessageToolCall], param: str) -> tuple[ToolCall, ...]:
    """Calls of a message. InvalidRequest: arguments that are not a JSON object."""
    calls = []
    for at, call in enumerate(tool_calls):
        text = call.function.arguments or "{}"
        if not _is_object(text):
            place = f"{param}[{at}].function.arguments"
            raise InvalidRequest(f"{place} are not a JSON object, as text", param=place)
        calls.append(ToolCall(call.id, call.function.name, text))
    return tuple(calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# -- in answers -----------------------------------------------------------------------------


def merge_tool_call_deltas(deltas: Iterable[Delta]) -> list[ToolCall]:
    """The calls of an answer, put together."""
    ids: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in (part for delta in deltas for part in delta.tool_calls):
        if part.index == len(ids):
            ids.append(part.id or "")
            names.append(part.name or "")
            arguments.append([])
        arguments[part.index].append(part.arguments)
    texts = ("".join(pieces) for pieces in arguments)
    return [ToolCall(*call) for call in zip(ids, names, texts, strict=True)]


def tool_call_fields(call: ToolCall) -> dict[str, Any]:
    """A call in a whole message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def tool_call_delta_fields(delta: ToolCallDelta) -> dict[str, Any]:
    """More of a call, in a stream."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    call = ToolCall(delta.id, delta.name or "", delta.arguments)
    return {"index": delta.index, **tool_call_fields(call)}
