"""How a family of models writes calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.pattern import Pattern, Spec
from localgen.backends.text.tool_arguments import Arguments, JsonArguments, XmlArguments
from localgen.backends.types import Tool, ToolCall

# beside these, properties are not all there is
_MORE_PROPERTIES = {"patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref"}


@dataclass(frozen=True)
class Shape:
    """One way to write calls: a section of one call, or of several.

    open: up to the arguments of the first call; close: behind the arguments of each. join: from
    there to the arguments of a further one, if a section may hold several; end: what ends it.
    is_xml: arguments are tagged parameters rather than a JSON object.
    written: whether a model may be held to it; any other is only read.
    """

    open: Spec
    close: Spec = ()
    join: Spec = ()
    end: Spec = ()
    is_xml: bool = False
    written: bool = True

    @cached_property
    def opening(self) -> Pattern:
        return Pattern(self.open, self._ahead)

    @cached_property
    def closing(self) -> Pattern:
        return Pattern(self.close)

    @cached_property
    def joining(self) -> Pattern | None:
        return Pattern(self.join, self._ahead) if self.join else None

    @cached_property
    def ending(self) -> Pattern | None:
        return Pattern(self.end) if self.end else None

    @property
    def _ahead(self) -> str:
        return "" if self.is_xml else "{"

    def arguments(self, tool: Tool) -> Arguments:
        """A reader of the arguments of one call."""
        return XmlArguments(properties(tool)) if self.is_xml else JsonArguments()


@dataclass(frozen=True)
class Format:
    """The shapes of a family. marks: the texts among them that may be control tokens.

    leads: an answer with calls begins with one; elsewhere they may stand behind text.
    in_system: the template takes the tools as a text within the system message, and does not
    write calls back: they go into the content.
    around: what stands before, between and behind calls as text, where templates do not write it.
    """

    name: str
    shapes: tuple[Shape, ...]
    marks: tuple[str, ...] = ()
    leads: bool = False
    in_system: bool = False
    around: tuple[str, str, str] = ("", "", "")

    def as_text(self, calls: Sequence[ToolCall]) -> str:
        """Calls as this family writes them."""
        opening, between, closing = self.around
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        return opening + between.join(objects) + closing


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments as it was given. InvalidRequest: it is none."""
    try:
        schema = json.loads(tool.parameters)
    except ValueError as error:
        raise _wrong(tool, f"not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _wrong(tool, "give a JSON schema, which is an object")
    return schema


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema that arguments are held to; an object in any case. InvalidRequest: it is not.

    What it does not name among its properties may not be given, unless it says so itself.
    """
    schema = parameters_of(tool)
    if schema.setdefault("type", "object") != "object":
        raise _wrong(tool, f"the type must be object, not {json.dumps(schema['type'])}")
    if "properties" in schema and not schema.keys() & _MORE_PROPERTIES:
        schema.setdefault("additionalProperties", False)
    return schema


def _wrong(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the parameters of {tool.name}: {reason}", param="tools")


def properties(tool: Tool) -> dict[str, Any]:
    """The schemas of a tool's arguments by their names."""
    found = schema_of(tool).get("properties", {})
    return found if isinstance(found, dict) else {}
