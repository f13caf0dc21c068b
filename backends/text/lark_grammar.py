"""Grammars of answers with calls and thoughts, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.pattern import NAME, SPACE, Spec
from localgen.backends.text.reasoning import Tags
from localgen.backends.text.tool_arguments import is_plain
from localgen.backends.text.tool_format import Format, Shape, properties, schema_of
from localgen.backends.types import Tool

# between the parts of JSON; without a bound a model may indent for ever
WHITESPACE = r"[\x20\x0A\x09]{1,16}"
# a grammar of its own, which holds what is content
HELD = "@content"
# what a schema says of all properties together
_NOT_IN_TAGS = {
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "$ref",
    "patternProperties",
    "minProperties",
}
_BASE = r"""
TEXT: /(.|\n)*/
SP: /[ \n\t]{0,8}/
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What an answer is made of: thoughts, free text or content held to a grammar, calls.

    marks: texts that are control tokens. tags: thoughts may come first; is_open: they do, and
    the prompt has opened them. tools: those that may be called, in this format. required: calls
    and nothing else. several: more than one.
    """

    marks: Mapping[str, int]
    tags: Tags | None = None
    is_open: bool = False
    format: Format | None = None
    tools: tuple[Tool, ...] = ()
    required: bool = False
    several: bool = True

    def lark(self, *, held: bool) -> str | None:
        """The grammar; None: any text will do. held: what is content is held to HELD."""
        if self.format is None and not held:
            return None
        return _Writer(self).grammar(self.format, held=held)


@dataclass(slots=True)
class _Writer:
    """Collects the rules of one grammar; a rule or terminal is named by its number."""

    frame: Frame
    lines: list[str] = field(default_factory=list)

    def grammar(self, format: Format | None, *, held: bool) -> str:
        if format is None or (held and not self.frame.required):
            calls = f"{self.calls(format)} | " if format else ""
            start = self.thoughtful(self.rule(f"{calls}{HELD}"), "SP")
        elif self.frame.required:
            start = self.thoughtful(self.calls(format), "SP")
        elif format.leads:
            start = self.thoughtful(self.rule(f"{self.calls(format)} | {self.uncalled(format)}"))
        else:
            start = self.mixed(format)
        return f"start: {start}\n" + "\n".join(self.lines) + _BASE

    # -- parts of an answer -----------------------------------------------------------------

    def thoughtful(self, answer: str, between: str = "") -> str:
        """An answer behind thoughts, if there may be any."""
        tags = self.frame.tags
        if tags is None:
            return answer
        thought = f"{self.upto(tags.close, tags.marks)} {between}"
        if self.frame.is_open:
            return f"{thought} {answer}"
        return f"({self.tag(tags.open, tags.marks)} {thought})? {answer}"

    def mixed(self, format: Format) -> str:
        """Free text with sections of calls in it; thoughts come first if there are any."""
        trigger, section = str(format.shapes[0].open[0]), self.section(format)
        repeats = self.frame.several and not any(shape.join for shape in format.shapes)
        free = self.answer("TEXT", trigger, section, repeats=repeats)
        tags = self.frame.tags
        if tags is None:
            return free
        thought = f"{self.upto(tags.close, tags.marks)} {free}"
        if self.frame.is_open:
            return thought
        opening = self.tag(tags.open, tags.marks, "SP")
        if opening.startswith("<["):  # text cannot begin with a control token
            return f"{opening} {thought} | {free}"
        first = self.terminal(f"TEXT & ~(SP {_quoted(tags.open)} TEXT)")
        plain = self.answer(first, trigger, section, repeats=repeats)
        return f"{opening} {thought} | {plain}"

    def answer(self, first: str, trigger: str, section: str, *, repeats: bool) -> str:
        """Text, which may turn into a section of calls; first: a terminal of how it begins."""
        if not repeats:
            return self.rule(f"{first} | {self.upto(trigger, (trigger,), first)} {section}")
        more = f"({self.upto(trigger, (trigger,))} {section})* TEXT"
        return self.rule(f"{first} | {self.upto(trigger, (trigger,), first)} {section} {more}")

    def uncalled(self, format: Format) -> str:
        """Text that does not begin as a call, nor with thoughts."""
        spec = format.shapes[0].open
        begin = " ".join(_literal(part, "") for part in spec[: spec.index('"name"') + 1])
        tags = self.frame.tags
        thoughts = f" & ~(SP {_quoted(tags.open)} TEXT)" if tags else ""
        return self.terminal(f"TEXT & ~({begin} TEXT){thoughts}")

    def calls(self, format: Format) -> str:
        """Calls and nothing else."""
        if format.leads:
            return self.section(format)
        opening = self.tag(str(format.shapes[0].open[0]), format.marks)
        section = self.rule(f"{opening} {self.section(format)}")
        repeats = self.frame.several and not any(shape.join for shape in format.shapes)
        return self.rule(f"{section} (SP {section})*") if repeats else section

    def section(self, format: Format) -> str:
        """What comes behind the text that opens a section; if it leads, the whole of it."""
        ways = []
        for shape in format.shapes:
            is_marked = not format.leads or shape.open[0] in self.frame.marks
            if shape.written and (is_marked or shape.open[0] is SPACE):
                skipped = 0 if format.leads else 1
                ways.append(self.one_section(shape, skipped))
        return self.rule(" | ".join(ways))

    def one_section(self, shape: Shape, skipped: int) -> str:
        tools = self.frame.tools
        first = self.rule(" | ".join(self.call(shape, shape.open[skipped:], t) for t in tools))
        end = self.items(shape.end)
        if not shape.join or not self.frame.several:
            return f"{first} {end}"
        more = self.rule(" | ".join(self.call(shape, shape.join, t) for t in tools))
        return f"{first} {more}* {end}"

    def call(self, shape: Shape, opening: Spec, tool: Tool) -> str:
        arguments = self.xml(tool) if shape.is_xml else self.json(schema_of(tool))
        return f"{self.items(opening, tool.name)} {arguments} {self.items(shape.close)}"

    # -- arguments --------------------------------------------------------------------------

    def json(self, schema: dict[str, Any]) -> str:
        return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})

    def xml(self, tool: Tool) -> str:
        """Tagged parameters in the order of the schema."""
        schema = schema_of(tool)
        if schema.keys() & _NOT_IN_TAGS:
            keys = ", ".join(sorted(schema.keys() & _NOT_IN_TAGS))
            raise InvalidRequest(
                f"the parameters of {tool.name}: this model writes them one by one, {keys} cannot "
                "be held to: give type, properties and required",
                param="tools",
            )
        shared: dict[str, Any] = {
            name: schema[name] for name in ("$defs", "definitions") if name in schema
        }
        parameters = []
        for name, value in properties(tool).items():
            opening = self.terminal(f"SP {_quoted(f'<parameter={name}>')} /\\n/")
            rule = self.rule(f"{opening} {self.xml_value(value, shared)}")
            parameters.append(rule if name in schema.get("required", ()) else f"{rule}?")
        return " ".join(parameters)

    def xml_value(self, schema: Any, shared: dict[str, Any]) -> str:
        closing = "\n</parameter>"
        if not is_plain(schema):
            value = {**schema, **shared} if isinstance(schema, dict) else {}
            return f"{self.json(value)} {_quoted(closing)}"
        if "enum" not in schema:
            return self.upto(closing, ())
        return self.terminal(" | ".join(_quoted(value + closing) for value in schema["enum"]))

    # -- symbols ----------------------------------------------------------------------------

    def items(self, spec: Spec, name: str = "") -> str:
        """A spec as a sequence of symbols."""
        symbols: list[str] = []
        texts: list[str] = []
        for part in spec:
            mark = self.frame.marks.get(part) if isinstance(part, str) else None
            if mark is None:
                texts.append(_literal(part, name))
                continue
            symbols += [self.terminal(" ".join(texts))] if texts else []
            symbols.append(f"<[{mark}]>")
            texts = []
        symbols += [self.terminal(" ".join(texts))] if texts else []
        return " ".join(symbols)

    def tag(self, text: str, marks: tuple[str, ...], blanks: str = "") -> str:
        """A text that may begin with a control token; blanks: what may stand before any other."""
        for mark in marks:
            if mark in self.frame.marks and text.startswith(mark):
                rest = text[len(mark) :]
                return f"<[{self.frame.marks[mark]}]>" + (f" {_quoted(rest)}" if rest else "")
        return self.terminal(f"{blanks} {_quoted(text)}")

    def upto(self, text: str, marks: tuple[str, ...], before: str = "TEXT") -> str:
        """Any text up to this one, and it."""
        if text in marks and text in self.frame.marks:
            return self.rule(f"{before} <[{self.frame.marks[text]}]>")
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {before} {_quoted(text)}")
        return name

    def rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _literal(part: object, name: str) -> str:
    if part is SPACE:
        return "SP"
    return _quoted(name if part is NAME else str(part))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
