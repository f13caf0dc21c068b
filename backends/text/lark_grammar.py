"""Grammars of answers with calls and thoughts, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.pattern import NAME, SPACE, SyntaxSpec
from localgen.backends.text.reasoning import ThinkingTags
from localgen.backends.text.tool_arguments import is_unquoted_string
from localgen.backends.text.tool_format import (
    CallSyntax,
    ToolCallFormat,
    argument_schemas,
    arguments_schema,
)
from localgen.backends.types import Tool

# between the parts of JSON; without a bound a model may indent for ever
WHITESPACE = r"[\x20\x0A\x09]{1,16}"
# a grammar of its own, which holds what is content
CONTENT_RULE = "@content"
# what a schema says of all properties together
_UNSUPPORTED_IN_XML = {
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
class ResponseGrammar:
    """What an answer is made of: thoughts, free text or content held to a grammar, calls.

    control_token_ids: texts that are control tokens. thinking_tags: thoughts may come first;
    is_thinking_open: they do, and the prompt has opened them. tools: those that may be called, in
    this format. calls_required: calls and nothing else. parallel_calls: more than one.
    """

    control_token_ids: Mapping[str, int]
    thinking_tags: ThinkingTags | None = None
    is_thinking_open: bool = False
    call_format: ToolCallFormat | None = None
    tools: tuple[Tool, ...] = ()
    calls_required: bool = False
    parallel_calls: bool = True

    def to_lark(self, *, constrain_content: bool) -> str | None:
        """The grammar; None: any text will do. constrain_content: what is content is held to
        CONTENT_RULE."""
        if self.call_format is None and not constrain_content:
            return None
        return _LarkWriter(self).grammar(self.call_format, constrain_content=constrain_content)


@dataclass(slots=True)
class _LarkWriter:
    """Collects the rules of one grammar; a rule or terminal is named by its number."""

    response: ResponseGrammar
    lines: list[str] = field(default_factory=list)

    def grammar(self, format: ToolCallFormat | None, *, constrain_content: bool) -> str:
        if format is None or (constrain_content and not self.response.calls_required):
            calls = f"{self.calls(format)} | " if format else ""
            start = self.with_reasoning(self.rule(f"{calls}{CONTENT_RULE}"), "SP")
        elif self.response.calls_required:
            start = self.with_reasoning(self.calls(format), "SP")
        elif format.calls_first:
            start = self.with_reasoning(
                self.rule(f"{self.calls(format)} | {self.text_without_calls(format)}")
            )
        else:
            start = self.text_with_calls(format)
        return f"start: {start}\n" + "\n".join(self.lines) + _BASE

    # -- parts of an answer -----------------------------------------------------------------

    def with_reasoning(self, answer: str, between: str = "") -> str:
        """An answer behind thoughts, if there may be any."""
        tags = self.response.thinking_tags
        if tags is None:
            return answer
        thought = f"{self.until(tags.close, tags.control_tokens)} {between}"
        if self.response.is_thinking_open:
            return f"{thought} {answer}"
        return f"({self.tag(tags.open, tags.control_tokens)} {thought})? {answer}"

    def text_with_calls(self, format: ToolCallFormat) -> str:
        """Free text with sections of calls in it; thoughts come first if there are any."""
        trigger, section = str(format.syntaxes[0].open[0]), self.section(format)
        repeats = self.response.parallel_calls and not any(shape.join for shape in format.syntaxes)
        free = self.text_then_calls("TEXT", trigger, section, repeats=repeats)
        tags = self.response.thinking_tags
        if tags is None:
            return free
        thought = f"{self.until(tags.close, tags.control_tokens)} {free}"
        if self.response.is_thinking_open:
            return thought
        opening = self.tag(tags.open, tags.control_tokens, "SP")
        if opening.startswith("<["):  # text cannot begin with a control token
            return f"{opening} {thought} | {free}"
        first = self.terminal(f"TEXT & ~(SP {_quoted(tags.open)} TEXT)")
        plain = self.text_then_calls(first, trigger, section, repeats=repeats)
        return f"{opening} {thought} | {plain}"

    def text_then_calls(self, first: str, trigger: str, section: str, *, repeats: bool) -> str:
        """Text, which may turn into a section of calls; first: a terminal of how it begins."""
        if not repeats:
            return self.rule(f"{first} | {self.until(trigger, (trigger,), first)} {section}")
        more = f"({self.until(trigger, (trigger,))} {section})* TEXT"
        return self.rule(f"{first} | {self.until(trigger, (trigger,), first)} {section} {more}")

    def text_without_calls(self, format: ToolCallFormat) -> str:
        """Text that does not begin as a call, nor with thoughts."""
        spec = format.syntaxes[0].open
        begin = " ".join(_literal(part, "") for part in spec[: spec.index('"name"') + 1])
        tags = self.response.thinking_tags
        thoughts = f" & ~(SP {_quoted(tags.open)} TEXT)" if tags else ""
        return self.terminal(f"TEXT & ~({begin} TEXT){thoughts}")

    def calls(self, format: ToolCallFormat) -> str:
        """Calls and nothing else."""
        if format.calls_first:
            return self.section(format)
        opening = self.tag(str(format.syntaxes[0].open[0]), format.control_tokens)
        section = self.rule(f"{opening} {self.section(format)}")
        repeats = self.response.parallel_calls and not any(shape.join for shape in format.syntaxes)
        return self.rule(f"{section} (SP {section})*") if repeats else section

    def section(self, format: ToolCallFormat) -> str:
        """What comes behind the text that opens a section; if it leads, the whole of it."""
        ways = []
        for shape in format.syntaxes:
            is_marked = not format.calls_first or shape.open[0] in self.response.control_token_ids
            if shape.can_constrain and (is_marked or shape.open[0] is SPACE):
                skipped = 0 if format.calls_first else 1
                ways.append(self.section_of(shape, skipped))
        return self.rule(" | ".join(ways))

    def section_of(self, syntax: CallSyntax, skipped: int) -> str:
        tools = self.response.tools
        first = self.rule(" | ".join(self.call(syntax, syntax.open[skipped:], t) for t in tools))
        end = self.symbols(syntax.end)
        if not syntax.join or not self.response.parallel_calls:
            return f"{first} {end}"
        more = self.rule(" | ".join(self.call(syntax, syntax.join, t) for t in tools))
        return f"{first} {more}* {end}"

    def call(self, syntax: CallSyntax, opening: SyntaxSpec, tool: Tool) -> str:
        arguments = self.xml(tool) if syntax.is_xml else self.json(arguments_schema(tool))
        return f"{self.symbols(opening, tool.name)} {arguments} {self.symbols(syntax.close)}"

    # -- arguments --------------------------------------------------------------------------

    def json(self, schema: dict[str, Any]) -> str:
        return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}})

    def xml(self, tool: Tool) -> str:
        """Tagged parameters in the order of the schema."""
        schema = arguments_schema(tool)
        if schema.keys() & _UNSUPPORTED_IN_XML:
            keys = ", ".join(sorted(schema.keys() & _UNSUPPORTED_IN_XML))
            raise InvalidRequest(
                f"the parameters of {tool.name}: this model writes them one by one, {keys} cannot "
                "be held to: give type, properties and required",
                param="tools",
            )
        shared: dict[str, Any] = {
            name: schema[name] for name in ("$defs", "definitions") if name in schema
        }
        parameters = []
        for name, value in argument_schemas(tool).items():
            opening = self.terminal(f"SP {_quoted(f'<parameter={name}>')} /\\n/")
            rule = self.rule(f"{opening} {self.xml_value(value, shared)}")
            parameters.append(rule if name in schema.get("required", ()) else f"{rule}?")
        return " ".join(parameters)

    def xml_value(self, schema: Any, shared: dict[str, Any]) -> str:
        closing = "\n</parameter>"
        if not is_unquoted_string(schema):
            value = {**schema, **shared} if isinstance(schema, dict) else {}
            return f"{self.json(value)} {_quoted(closing)}"
        if "enum" not in schema:
            return self.until(closing, ())
        return self.terminal(" | ".join(_quoted(value + closing) for value in schema["enum"]))

    # -- symbols ----------------------------------------------------------------------------

    def symbols(self, spec: SyntaxSpec, name: str = "") -> str:
        """A spec as a sequence of symbols."""
        symbols: list[str] = []
        texts: list[str] = []
        for part in spec:
            mark = self.response.control_token_ids.get(part) if isinstance(part, str) else None
            if mark is None:
                texts.append(_literal(part, name))
                continue
            symbols += [self.terminal(" ".join(texts))] if texts else []
            symbols.append(f"<[{mark}]>")
            texts = []
        symbols += [self.terminal(" ".join(texts))] if texts else []
        return " ".join(symbols)

    def tag(self, text: str, control_tokens: tuple[str, ...], blanks: str = "") -> str:
        """A text that may begin with a control token; blanks: what may stand before any other."""
        for mark in control_tokens:
            if mark in self.response.control_token_ids and text.startswith(mark):
                rest = text[len(mark) :]
                return f"<[{self.response.control_token_ids[mark]}]>" + (
                    f" {_quoted(rest)}" if rest else ""
                )
        return self.terminal(f"{blanks} {_quoted(text)}")

    def until(self, text: str, control_tokens: tuple[str, ...], before: str = "TEXT") -> str:
        """Any text up to this one, and it."""
        if text in control_tokens and text in self.response.control_token_ids:
            return self.rule(f"{before} <[{self.response.control_token_ids[text]}]>")
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
