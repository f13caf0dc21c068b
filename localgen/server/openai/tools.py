"""Tools and tool calls of the OpenAI API."""

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
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_MAX_NAME_CHARS = 64
# name of the only argument of a call that was cut
INCOMPLETE_ARGUMENTS = "incomplete_arguments"
_TOOL_CHOICE_MODES = ("auto", "none", "required")


class FunctionDefinition(StrictModel):
    """A function signature. strict is ignored: arguments are always constrained."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    """A tool. Only functions are supported. cache_control: ignored, prompts are always cached."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None


class FunctionCall(StrictModel):
    """A called function. arguments: a JSON object as text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(StrictModel):
    """A tool call in an assistant message. index: ignored; sent by clients that merge deltas."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


def parse_tools(function_tools: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    """Validate and convert tools. Raises InvalidRequest for invalid or duplicate names."""
    require_tool_names([tool.function.name for tool in function_tools], "tools[{}].function.name")
    return tuple(_to_tool(tool.function) for tool in function_tools)


def require_tool_names(names: Sequence[str], place: str, max_chars: int = _MAX_NAME_CHARS) -> None:
    """Raise InvalidRequest if there are too many names, or one is invalid or there twice.

    place: format of the path of a name, with {} for its index.
    """
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"more than {MAX_TOOLS} tools", param="tools")
    seen: set[str] = set()
    for at, name in enumerate(names):
        param = place.format(at)
        if len(name) > max_chars or not _FUNCTION_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{param} {name!r}: use 1 to {max_chars} letters, digits, _, - or .", param=param
            )
        if name in seen:
            raise InvalidRequest(f"{param}: duplicate tool {name}", param=param)
        seen.add(name)


def _to_tool(function: FunctionDefinition) -> Tool:
    description = function.description or ""
    if not function.parameters:
        return Tool(function.name, description)
    return Tool(function.name, description, json.dumps(function.parameters, ensure_ascii=False))


def parse_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> str:
    """Return auto, none, required or a tool name. Raises InvalidRequest for anything else."""
    if choice is None:
        return "auto"
    name = _named_function(choice)
    if name is None and choice not in _TOOL_CHOICE_MODES:
        raise InvalidRequest(
            f"tool_choice: use {', '.join(_TOOL_CHOICE_MODES)}, or "
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    if name is not None and name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidRequest(
            f"tool_choice: no tool {name!r} in tools ({known})",
            param="tool_choice",
        )
    return str(choice) if name is None else name


def _named_function(choice: str | dict[str, Any]) -> str | None:
    """Return the function name of an object choice, or None for other forms."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "function", "name": str(name)}:  # in the Responses API
            return name
    return None


def parse_tool_calls(tool_calls: Iterable[MessageToolCall], param: str) -> tuple[ToolCall, ...]:
    """Convert tool calls. Raises InvalidRequest as parse_arguments."""
    calls = []
    for at, call in enumerate(tool_calls):
        place = f"{param}[{at}].function.arguments"
        arguments = parse_arguments(call.function.arguments, place)
        calls.append(ToolCall(call.id, call.function.name, arguments))
    return tuple(calls)


def parse_arguments(text: str, param: str) -> str:
    """Return the arguments of an earlier call as a JSON object in a string.

    A call that was cut, for example at max_tokens, keeps what there is of it as one argument.
    Raises InvalidRequest for JSON that is not an object.
    """
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return json.dumps({INCOMPLETE_ARGUMENTS: text}, ensure_ascii=False)
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{param} is not a JSON object in a string", param=param)
    return text or "{}"


# -- in responses ---------------------------------------------------------------------------


def merge_tool_call_deltas(deltas: Iterable[Delta]) -> list[ToolCall]:
    """Merge the deltas of an answer into complete tool calls."""
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
    """Build a tool call of a complete message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def tool_call_delta_fields(delta: ToolCallDelta) -> dict[str, Any]:
    """Build a tool call delta of a stream chunk."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    call = ToolCall(delta.id, delta.name or "", delta.arguments)
    return {"index": delta.index, **tool_call_fields(call)}
