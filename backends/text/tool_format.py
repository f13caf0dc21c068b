"""The syntax in which a model family writes tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.pattern import PartialPattern, SyntaxSpec
from localgen.backends.text.tool_arguments import (
    ArgumentsParser,
    JsonArgumentsParser,
    XmlArgumentsParser,
)
from localgen.backends.types import Tool, ToolCall

# with these keywords, other properties than those listed may be allowed
_OPEN_SCHEMA_KEYS = {"patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref"}


@dataclass(frozen=True)
class CallSyntax:
    """One syntax for a section of one or several tool calls.

    open: up to the arguments of the first call.
    close: after the arguments of each call.
    join: from there to the arguments of the next call, if a section may hold several.
    end: closes the section.
    is_xml: arguments are parameter tags instead of a JSON object.
    can_constrain: may be used in a grammar; otherwise it is only parsed.
    """

    open: SyntaxSpec
    close: SyntaxSpec = ()
    join: SyntaxSpec = ()
    end: SyntaxSpec = ()
    is_xml: bool = False
    can_constrain: bool = True

    @cached_property
    def open_pattern(self) -> PartialPattern:
        return PartialPattern(self.open, self._lookahead)

    @cached_property
    def close_pattern(self) -> PartialPattern:
        return PartialPattern(self.close)

    @cached_property
    def join_pattern(self) -> PartialPattern | None:
        return PartialPattern(self.join, self._lookahead) if self.join else None

    @cached_property
    def end_pattern(self) -> PartialPattern | None:
        return PartialPattern(self.end) if self.end else None

    @property
    def _lookahead(self) -> str:
        return "" if self.is_xml else "{"

    def arguments_parser(self, tool: Tool) -> ArgumentsParser:
        """Return a parser for the arguments of one call."""
        return XmlArgumentsParser(argument_schemas(tool)) if self.is_xml else JsonArgumentsParser()


@dataclass(frozen=True)
class ToolCallFormat:
    """The tool call syntaxes of a model family.

    control_tokens: the texts that may be control tokens.
    calls_first: a response with calls begins with one; otherwise calls may follow text.
    tools_in_system: the template takes the tools as text in the system message and does not render
    calls, so they are added to the content.
    delimiters: text before, between and after calls, if the template does not write them.
    """

    name: str
    syntaxes: tuple[CallSyntax, ...]
    control_tokens: tuple[str, ...] = ()
    calls_first: bool = False
    tools_in_system: bool = False
    delimiters: tuple[str, str, str] = ("", "", "")

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """Render calls as text in this format."""
        opening, between, closing = self.delimiters
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        return opening + between.join(objects) + closing


def parse_parameters(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments as given. Raises InvalidRequest."""
    try:
        schema = json.loads(tool.parameters)
    except ValueError as error:
        raise _invalid_parameters(tool, f"not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _invalid_parameters(tool, "not a JSON schema: give an object")
    return schema


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the object schema that constrains a tool's arguments.

    Properties that are not listed are not allowed, unless the schema says otherwise. Raises
    InvalidRequest if it is not an object schema.
    """
    schema = parse_parameters(tool)
    if schema.setdefault("type", "object") != "object":
        raise _invalid_parameters(
            tool, f"the type must be object, not {json.dumps(schema['type'])}"
        )
    if "properties" in schema and not schema.keys() & _OPEN_SCHEMA_KEYS:
        schema.setdefault("additionalProperties", False)
    return schema


def _invalid_parameters(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the parameters of {tool.name}: {reason}", param="tools")


def argument_schemas(tool: Tool) -> dict[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    found = arguments_schema(tool).get("properties", {})
    return found if isinstance(found, dict) else {}
