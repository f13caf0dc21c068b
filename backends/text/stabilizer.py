"""Removes from a prompt what changes from request to request without a meaning for the answer.

Clients put such text near the head of their prompts, and then the prefix cache serves nothing
behind it. Only system messages and tools are changed, by the rules of this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localgen.backends.types import Message, Request, Tool

_SYSTEM_ROLES = ("system", "developer")
# of requests: that are system messages, and that have some
_SYSTEM_FIELDS = frozenset({"system", "instructions"})
_MESSAGE_FIELDS = frozenset({"messages", "input"})
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    r"Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_WEEKDAY = r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? "


@dataclass(frozen=True, slots=True)
class _Rule:
    """Replaces text in system messages. name: for the note to the user."""

    name: str
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


_RULES = (
    # Claude Code: `x-anthropic-billing-header: cc_version=2.1.9; cch=9f3;`
    _Rule(
        "attribution header",
        re.compile(r"^(x-[a-z-]*billing-header:)(?:[ \t]*[\w.-]+=[^;\s]*;)+", re.MULTILINE),
        r"\1",
    ),
    _Rule(
        "clock time",
        re.compile(r"(?<![\d:])\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?![\d:])"),
        "00:00",
    ),
    _Rule(
        "date",
        re.compile(rf"(?:{_WEEKDAY})?\b({_MONTH}) {_DAY}(?:st|nd|rd|th)?\b(?!:)"),
        r"\1 1",
    ),
    _Rule("date", re.compile(rf"(?:{_WEEKDAY})?\b{_DAY} ({_MONTH}) (?=\d{{4}}\b)"), r"1 \1 "),
    _Rule("date", re.compile(r"\b(\d{4}[-/]\d{2}[-/])\d{2}(?=\b|T\d)"), r"\g<1>01"),
)


def stabilize(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return the request with stable system messages and tools, and notes of what was changed.

    Attribution headers lose their values, clock times become 00:00, and dates the first of their
    month. Tools are sorted by name, and their schemas by key.
    """
    found: dict[str, None] = {}
    messages = tuple(_stable_message(message, found) for message in request.messages or ())
    tools = tuple(sorted(map(_stable_tool, request.tools), key=lambda tool: tool.name))
    if tools != request.tools:
        found[f"order of {len(tools)} tools and their fields"] = None
    if not found:
        return request, ()
    changed = replace(
        request, messages=messages if request.messages is not None else None, tools=tools
    )
    return changed, (f"stabilized: {', '.join(found)}",)


def stabilize_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of any API, changed by the same rules, to tell whether two requests
    begin alike."""
    changed = dict(fields)
    for name in _SYSTEM_FIELDS & fields.keys():
        changed[name] = _stable_value(fields[name])
    for name in _MESSAGE_FIELDS & fields.keys():
        if isinstance(fields[name], list):
            changed[name] = [_stable_entry(entry) for entry in fields[name]]
    if isinstance(fields.get("tools"), list):
        changed["tools"] = sorted(fields["tools"], key=partial(json.dumps, sort_keys=True))
    return changed


def _stable_entry(entry: Any) -> Any:
    is_system = isinstance(entry, dict) and entry.get("role") in _SYSTEM_ROLES
    return _stable_value(entry) if is_system else entry


def _stable_value(value: Any) -> Any:
    """Changes all texts in it."""
    if isinstance(value, str):
        return _stable_text(value, {})
    if isinstance(value, list):
        return [_stable_value(each) for each in value]
    if isinstance(value, dict):
        return {name: _stable_value(each) for name, each in value.items()}
    return value


def _stable_message(message: Message, found: dict[str, None]) -> Message:
    if message.role not in _SYSTEM_ROLES:
        return message
    return replace(message, content=_stable_text(message.content, found))


def _stable_text(text: str, found: dict[str, None]) -> str:
    """found: gets the names of the rules that have changed it."""
    for rule in _RULES:
        stable = rule.pattern.sub(rule.replacement, text)
        if stable != text:
            found[rule.name] = None
            text = stable
    return text


def _stable_tool(tool: Tool) -> Tool:
    schema = json.loads(tool.parameters)
    stable = json.dumps(schema, sort_keys=True)
    return tool if stable == json.dumps(schema) else replace(tool, parameters=stable)
