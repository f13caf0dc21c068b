"""What a model's template knows of tools and thoughts, and how a request is put to it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text import tool_prompt
from localgen.backends.text.lark_grammar import Frame
from localgen.backends.text.reasoning import Tags, ThoughtParser, tags_of
from localgen.backends.text.response_parser import Reader
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.text.tool_families import GENERIC, family_of
from localgen.backends.text.tool_parser import CallParser
from localgen.backends.types import Message, Request

NO_TOOLS = "this model's template has no tools: they were described in the system message"
NO_SYSTEM = "this model's template has no tools: they were described in the first message"
ON_OR_OFF = "this model's template knows thinking on or off, no effort between"
# how templates call their tools; SmolLM3 has a name of its own for those written as JSON
_TOOL_VARIABLES = ("tools", "xml_tools")


@dataclass(frozen=True, slots=True)
class Opening:
    """How an answer begins. reader: of its parts; None: it is all content.

    frame: of its grammar; None: none is needed but that which was asked for.
    """

    prompt: str
    notes: tuple[str, ...] = ()
    reader: Reader | None = None
    frame: Frame | None = None


class Dialect:
    """The ways of one template with one tokenizer. Safe to call from any thread."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tags = tags_of(template.source)
        self._tools = next((name for name in _TOOL_VARIABLES if template.reads(name)), None)
        family = family_of(template.source, knows_tools=self._tools is not None)
        self._is_native = family is not None
        self._format = family or GENERIC
        tag_marks = self._tags.marks if self._tags else ()
        self._marks = _control_tokens(tokenizer, {*self._format.marks, *tag_marks})
        self._pieces = {token: text.encode() for text, token in self._marks.items()}

    def open(self, request: Request) -> Opening:
        """The beginning of an answer to the messages of a request. InvalidRequest."""
        assert request.messages is not None
        variables, notes = self._variables(request)
        tools = () if request.tool_choice == "none" else request.tools
        prompt, more = self._prompt(request.messages, request, variables)
        tags = self._tags_after(prompt, variables)
        if tags is None and not tools:
            return Opening(prompt, (*notes, *more))
        is_open = tags is not None and tags.are_open(prompt)
        reader = Reader(
            self._pieces,
            ThoughtParser(tags, is_open=is_open) if tags else None,
            CallParser(self._format, tools) if tools else None,
        )
        named = [tool for tool in tools if tool.name == request.tool_choice]
        frame = Frame(
            marks=self._marks,
            tags=tags,
            is_open=is_open,
            format=self._format if tools else None,
            tools=tuple(named or tools),
            required=bool(named) or request.tool_choice == "required",
            several=request.parallel_tool_calls,
        )
        return Opening(prompt, (*notes, *more), reader, frame)

    def _tags_after(self, prompt: str, variables: dict[str, Any]) -> Tags | None:
        """The tags that may come in the answer."""
        if self._tags is None or self._tags.are_over(prompt):
            return None
        is_off = variables.get("enable_thinking") is False
        return None if is_off and not self._tags.are_open(prompt) else self._tags

    def _variables(self, request: Request) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the request sets of the template's own variables."""
        variables: dict[str, Any] = {}
        notes: tuple[str, ...] = ()
        can_switch = self._template.reads("enable_thinking")
        effort = request.reasoning_effort
        if effort is not None and self._template.reads("reasoning_effort"):
            variables["reasoning_effort"] = effort
        elif effort is not None:
            if not can_switch:
                raise _no_setting("reasoning_effort")
            variables["enable_thinking"] = effort != "none"
            notes = () if effort == "none" else (ON_OR_OFF,)
        if request.thinking is not None and can_switch:
            variables["enable_thinking"] = request.thinking
        elif request.thinking not in (None, self._tags is not None):
            # one that always thinks, or never, is as asked where that is asked for
            raise _no_setting("chat_template_kwargs")
        return variables, notes

    # -- prompts ----------------------------------------------------------------------------

    def _prompt(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        """The rendered prompt, and what is to be said of it."""
        tools = () if request.tool_choice == "none" else request.tools
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if not tools and not has_calls:
            return self._template.render(messages, variables), ()
        if not self._is_native:
            return self._described(messages, request, variables)
        if self._format.in_system:
            return self._in_system(messages, request, variables), ()
        if tools:
            assert self._tools is not None
            variables = variables | {self._tools: tool_prompt.definitions(tools)}
        return self._template.render(messages, variables), ()

    def _in_system(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> str:
        turns = [tool_prompt.calls_as_text(message, self._format) for message in messages]
        if not request.tools or request.tool_choice == "none":
            return self._template.render(turns, variables)
        functions = [one["function"] for one in tool_prompt.definitions(request.tools)]
        text = json.dumps(functions, ensure_ascii=False)
        return self._template.render(tool_prompt.with_system(turns, ""), variables, {"tools": text})

    def _described(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        turns = tool_prompt.as_text(messages, self._format)
        if not request.tools or request.tool_choice == "none":
            return self._template.render(turns, variables), ()
        told = tool_prompt.with_system(turns, tool_prompt.description(request.tools))
        try:
            return self._template.render(told, variables), (NO_TOOLS,)
        except InvalidRequest:
            # some templates have no system message either
            told = tool_prompt.without_system(told)
            return self._template.render(told, variables), (NO_SYSTEM,)


def _no_setting(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's template does not let thinking be set ({param}): leave it out", param=param
    )


def _control_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Those of the texts that are one token each, without a text of its own."""
    start = len(tokenizer.encode(""))
    found = {}
    for text in texts:
        ids = tokenizer.encode(text)[start:]
        if len(ids) == 1 and not tokenizer.piece(ids[0]):
            found[text] = ids[0]
    return found
