"""How a family of models writes calls."""

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

# beside these, properties are not all there is
_OPEN_SCHEMA_KEYS = {"patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref"}


@dataclass(frozen=True)
class CallSyntax:
    """One way to write calls: a section of one call, or of several.

    open: up to the arguments of the first call; close: behind the arguments of each. join: from
    there to the arguments of a further one, if a section may hold several; end: what ends it.
    is_xml: arguments are tagged parameters rather than a JSON object.
    can_constrain: whether a model may be held to it; any other is only read.
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
        """A reader of the arguments of one call."""
        return XmlArgumentsParser(argument_schemas(tool)) if self.is_xml else JsonArgumentsParser()


@dataclass(frozen=True)
class ToolCallFormat:
    """The shapes of a family. control_tokens: the texts among them that may be control tokens.

    calls_first: an answer with calls begins with one; elsewhere they may stand behind text.
    tools_in_system: the template takes the tools as a text within the system message, and does not
    write calls back: they go into the content. delimiters: what stands before, between and behind
    calls as text, where templates do not write it.
    """

    name: str
    syntaxes: tuple[CallSyntax, ...]
    control_tokens: tuple[str, ...] = ()
    calls_first: bool = False
    tools_in_system: bool = False
    delimiters: tuple[str, str, str] = ("", "", "")

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls as this family writes them."""
        opening, between, closing = self.delimiters
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        return opening + between.join(objects) + closing


def parse_parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments as it was given. InvalidRequest: it is none."""
    try:
        schema = json.loads(tool.parameters)
    except ValueError as error:
        raise _invalid_parameters(tool, f"not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _invalid_parameters(tool, "give a JSON schema, which is an object")
    return schema


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that arguments are held to; an object in any case. InvalidRequest: it is not.

    What it does not name among its properties may not be given, unless it says so itself.
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
    """The schemas of a tool's arguments by their names."""
    found = arguments_schema(tool).get("properties", {})
    return found if isinstance(found, dict) else {}
