"""Lark grammars for llguidance: responses with reasoning and tool calls."""

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

# JSON whitespace; bounded, or a model may indent forever
WHITESPACE = r"[\x20\x0A\x09]{1,16}"
# keywords that llguidance does not know are not enforced: agents send many tools, and an error for
# one schema would be one for all their requests
TOOL_SCHEMA_OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": True}
# the sub-grammar that constrains the content
CONTENT_RULE = "@content"
# JSON schema keywords that apply to all properties together
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
    """The structure of a response: reasoning, then free or constrained content, and tool calls.

    control_token_ids: ids of the tags that are control tokens.
    thinking_tags: the response may begin with reasoning.
    is_thinking_open: the prompt ends inside reasoning, so the response begins with it.
    tools: the tools that may be called, in the format call_format.
    calls_required: the response is calls only.
    parallel_calls: more than one call is allowed.
    """

    control_token_ids: Mapping[str, int]
    thinking_tags: ThinkingTags | None = None
    is_thinking_open: bool = False
    call_format: ToolCallFormat | None = None
    tools: tuple[Tool, ...] = ()
    calls_required: bool = False
    parallel_calls: bool = True

    def to_lark(self, *, constrain_content: bool) -> str | None:
        """Return the Lark grammar, or None if any text is allowed.

        constrain_content: content must match CONTENT_RULE.
        """
        if self.call_format is None and not constrain_content:
            return None
        return _LarkWriter(self).grammar(self.call_format, constrain_content=constrain_content)


@dataclass(slots=True)
class _LarkWriter:
    """Collects the rules of one grammar. Rules and terminals are named by their number."""

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

    # -- parts of a response ----------------------------------------------------------------

    def with_reasoning(self, answer: str, between: str = "") -> str:
        """Prefix the answer with optional or required reasoning, if the model has thinking tags."""
        tags = self.response.thinking_tags
        if tags is None:
            return answer
        thought = f"{self.until(tags.close, tags.control_tokens)} {between}"
        if self.response.is_thinking_open:
            return f"{thought} {answer}"
        return f"({self.tag(tags.open, tags.control_tokens)} {thought})? {answer}"

    def text_with_calls(self, format: ToolCallFormat) -> str:
        """Free text containing tool call sections, after optional reasoning."""
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
        """Text that may be followed by a tool call section. first: terminal for leading text."""
        if not repeats:
            return self.rule(f"{first} | {self.until(trigger, (trigger,), first)} {section}")
        more = f"({self.until(trigger, (trigger,))} {section})* TEXT"
        return self.rule(f"{first} | {self.until(trigger, (trigger,), first)} {section} {more}")

    def text_without_calls(self, format: ToolCallFormat) -> str:
        """Text that starts neither with a tool call nor with reasoning."""
        spec = format.syntaxes[0].open
        begin = " ".join(_literal(part, "") for part in spec[: spec.index('"name"') + 1])
        tags = self.response.thinking_tags
        thoughts = f" & ~(SP {_quoted(tags.open)} TEXT)" if tags else ""
        return self.terminal(f"TEXT & ~({begin} TEXT){thoughts}")

    def calls(self, format: ToolCallFormat) -> str:
        """Tool calls only."""
        if format.calls_first:
            return self.section(format)
        opening = self.tag(str(format.syntaxes[0].open[0]), format.control_tokens)
        section = self.rule(f"{opening} {self.section(format)}")
        repeats = self.response.parallel_calls and not any(shape.join for shape in format.syntaxes)
        return self.rule(f"{section} (SP {section})*") if repeats else section

    def section(self, format: ToolCallFormat) -> str:
        """A tool call section, without its opening text unless calls come first."""
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
        return "%json " + json.dumps(schema | {"x-guidance": TOOL_SCHEMA_OPTIONS})

    def xml(self, tool: Tool) -> str:
        """Parameters as tags, in the order of the schema. Raises InvalidRequest."""
        schema = arguments_schema(tool)
        if schema.keys() & _UNSUPPORTED_IN_XML:
            keys = ", ".join(sorted(schema.keys() & _UNSUPPORTED_IN_XML))
            raise InvalidRequest(
                f"the parameters of {tool.name}: this model writes arguments as tags, which do not "
                f"support {keys}: use type, properties and required",
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
        """Convert a spec to a sequence of Lark symbols."""
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
        """A text that may begin with a control token. blanks: whitespace before any other text."""
        for mark in control_tokens:
            if mark in self.response.control_token_ids and text.startswith(mark):
                rest = text[len(mark) :]
                return f"<[{self.response.control_token_ids[mark]}]>" + (
                    f" {_quoted(rest)}" if rest else ""
                )
        return self.terminal(f"{blanks} {_quoted(text)}")

    def until(self, text: str, control_tokens: tuple[str, ...], before: str = "TEXT") -> str:
        """Any text up to and including `text`."""
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
