"""Tools and calls as OpenAI's protocol has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Delta, Tool, ToolCall, ToolCallDelta
from localgen.server.requests.body import Strict

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MODES = ("auto", "none", "required")


class Function(Strict):
    """strict is for other servers: arguments are always held to their schema here."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool; functions are the only kind there is."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """What was called. arguments: a JSON object as text."""

    name: str
    arguments: str = "{}"


class MessageCall(Strict):
    """A call in a message of the assistant. index: clients that keep stream deltas send it."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


def tools_of(given: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    """The tools of a request. InvalidRequest names the one that is wrong."""
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"more than {MAX_TOOLS} tools", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(given):
        name, param = tool.function.name, f"tools[{at}].function.name"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{param} {name!r}: give 1 to 64 letters, digits, _, - or .", param=param
            )
        if name in names:
            raise InvalidRequest(f"{param}: there are two tools {name}", param=param)
        names.add(name)
    return tuple(_tool(tool.function) for tool in given)


def _tool(function: Function) -> Tool:
    description = function.description or ""
    if not function.parameters:
        return Tool(function.name, description)
    return Tool(function.name, description, json.dumps(function.parameters, ensure_ascii=False))


def choice_of(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> str:
    """auto, none, required or the name of a tool. InvalidRequest: none of them."""
    if choice is None:
        return "auto"
    name = _name_in(choice)
    if name is None and choice not in _MODES:
        raise InvalidRequest(
            f"tool_choice: give {', '.join(_MODES)}, or "
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


def _name_in(choice: str | dict[str, Any]) -> str | None:
    """The function that is to be called; None: the choice is not of that form."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def calls_of(given: Iterable[MessageCall], param: str) -> tuple[ToolCall, ...]:
    """Calls of a message. InvalidRequest: arguments that are not a JSON object."""
    calls = []
    for at, call in enumerate(given):
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


def whole_calls(deltas: Iterable[Delta]) -> list[ToolCall]:
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


def call_fields(call: ToolCall) -> dict[str, Any]:
    """A call in a whole message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def delta_fields(part: ToolCallDelta) -> dict[str, Any]:
    """More of a call, in a stream."""
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    call = ToolCall(part.id, part.name or "", part.arguments)
    return {"index": part.index, **call_fields(call)}
