"""Render requests with the model's chat template, including tools and thinking options."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.text import tool_prompt
from localgen.backends.text.lark_grammar import ResponseGrammar
from localgen.backends.text.reasoning import ReasoningParser, ThinkingTags, detect_thinking_tags
from localgen.backends.text.response_parser import ResponseParser
from localgen.backends.text.template import PromptTemplate
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.text.tool_families import DEFAULT_FORMAT, detect_call_format
from localgen.backends.text.tool_parser import ToolCallParser
from localgen.backends.types import Message, Request

TOOLS_IN_SYSTEM_NOTE = (
    "this model's chat template does not support tools: they are in the system message"
)
TOOLS_IN_FIRST_MESSAGE_NOTE = (
    "this model's chat template does not support tools: they are in the first user message"
)
THINKING_ON_OFF_NOTE = "this model's chat template has thinking on or off, no reasoning effort"
# the template variables for tools; SmolLM3 has its own name for tools written as JSON
_TOOL_VARIABLES = ("tools", "xml_tools")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt and how to parse and constrain the response to it.

    response_parser: None if the response is all content. response_grammar: None if it has no
    reasoning and no tool calls.
    """

    text: str
    notes: tuple[str, ...] = ()
    response_parser: ResponseParser | None = None
    response_grammar: ResponseGrammar | None = None


class PromptRenderer:
    """Renders requests for one chat template and tokenizer. Thread-safe."""

    def __init__(self, template: PromptTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._thinking_tags = detect_thinking_tags(template.source)
        self._tools_variable = next(
            (name for name in _TOOL_VARIABLES if template.uses_variable(name)), None
        )
        family = detect_call_format(template.source, has_tools=self._tools_variable is not None)
        self._has_native_tools = family is not None
        self._call_format = family or DEFAULT_FORMAT
        tag_marks = self._thinking_tags.control_tokens if self._thinking_tags else ()
        self._control_token_ids = _control_tokens(
            tokenizer, {*self._call_format.control_tokens, *tag_marks}
        )
        self._control_pieces = {
            token: text.encode() for text, token in self._control_token_ids.items()
        }

    def render(self, request: Request) -> RenderedPrompt:
        """Render the messages of a request. Raises InvalidRequest."""
        assert request.messages is not None
        variables, notes = self._template_variables(request)
        tools = () if request.tool_choice == "none" else request.tools
        prompt, more = self._render_prompt(request.messages, request, variables)
        tags = self._expected_thinking_tags(prompt, variables)
        if request.prefill:
            prompt = _begin_answer(prompt, request.prefill, tags)
        if tags is None and not tools:
            return RenderedPrompt(prompt, (*notes, *more))
        is_open = tags is not None and tags.is_open_after(prompt)
        reader = ResponseParser(
            self._control_pieces,
            ReasoningParser(tags, is_open=is_open) if tags else None,
            ToolCallParser(self._call_format, tools) if tools else None,
        )
        named = [tool for tool in tools if tool.name == request.tool_choice]
        frame = ResponseGrammar(
            control_token_ids=self._control_token_ids,
            thinking_tags=tags,
            is_thinking_open=is_open,
            call_format=self._call_format if tools else None,
            tools=tuple(named or tools),
            calls_required=bool(named) or request.tool_choice == "required",
            parallel_calls=request.parallel_tool_calls,
        )
        return RenderedPrompt(prompt, (*notes, *more), reader, frame)

    def _expected_thinking_tags(
        self, prompt: str, variables: dict[str, Any]
    ) -> ThinkingTags | None:
        """The thinking tags that may occur in the response, if any."""
        if self._thinking_tags is None or self._thinking_tags.is_closed_after(prompt):
            return None
        is_off = variables.get("enable_thinking") is False
        return (
            None
            if is_off and not self._thinking_tags.is_open_after(prompt)
            else self._thinking_tags
        )

    def _template_variables(self, request: Request) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Variables for the request's thinking options, and notes. Raises InvalidRequest."""
        variables: dict[str, Any] = {}
        notes: tuple[str, ...] = ()
        can_switch = self._template.uses_variable("enable_thinking")
        effort = request.reasoning_effort
        if effort is not None and self._template.uses_variable("reasoning_effort"):
            variables["reasoning_effort"] = effort
        elif effort is not None:
            never_thinks = self._thinking_tags is None and effort == "none"
            if not can_switch and not never_thinks:
                raise _thinking_not_configurable("reasoning_effort")
            variables["enable_thinking"] = effort != "none"
            notes = () if effort == "none" else (THINKING_ON_OFF_NOTE,)
        if request.thinking is not None and can_switch:
            variables["enable_thinking"] = request.thinking
        elif request.thinking not in (None, self._thinking_tags is not None):
            # no error if the model always (or never) thinks and the request asks for just that
            raise _thinking_not_configurable("chat_template_kwargs")
        return variables, notes

    # -- prompts ----------------------------------------------------------------------------

    def _render_prompt(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        """Return the rendered prompt and notes on it."""
        tools = () if request.tool_choice == "none" else request.tools
        has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if not tools and not has_calls:
            return self._template.render(messages, variables), ()
        if not self._has_native_tools:
            return self._render_with_tool_prompt(messages, request, variables)
        if self._call_format.tools_in_system:
            return self._render_with_system_tools(messages, request, variables), ()
        if tools:
            assert self._tools_variable is not None
            variables = variables | {self._tools_variable: tool_prompt.tool_definitions(tools)}
        return self._template.render(messages, variables), ()

    def _render_with_system_tools(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> str:
        turns = [tool_prompt.inline_tool_calls(message, self._call_format) for message in messages]
        if not request.tools or request.tool_choice == "none":
            return self._template.render(turns, variables)
        functions = [one["function"] for one in tool_prompt.tool_definitions(request.tools)]
        text = json.dumps(functions, ensure_ascii=False)
        return self._template.render(
            tool_prompt.append_to_system_message(turns, ""), variables, {"tools": text}
        )

    def _render_with_tool_prompt(
        self, messages: tuple[Message, ...], request: Request, variables: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        turns = tool_prompt.inline_tool_messages(messages, self._call_format)
        if not request.tools or request.tool_choice == "none":
            return self._template.render(turns, variables), ()
        messages_with_tools = tool_prompt.append_to_system_message(
            turns, tool_prompt.tool_instructions(request.tools)
        )
        try:
            return self._template.render(messages_with_tools, variables), (TOOLS_IN_SYSTEM_NOTE,)
        except InvalidRequest:
            # some templates do not support a system message either
            messages_with_tools = tool_prompt.merge_system_into_user(messages_with_tools)
            return self._template.render(messages_with_tools, variables), (
                TOOLS_IN_FIRST_MESSAGE_NOTE,
            )


def _begin_answer(prompt: str, prefill: str, tags: ThinkingTags | None) -> str:
    """The prompt with the beginning of the answer. Raises InvalidRequest if reasoning comes first.

    tags: the thinking tags that may occur in the response.
    """
    if tags is not None and tags.is_open_after(prompt):
        raise InvalidRequest(
            "this model's answers begin with reasoning, so the last message cannot be the "
            "beginning of an answer: switch thinking off, or end with a message of the user",
            param="messages",
        )
    return prompt + prefill


def _thinking_not_configurable(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model's chat template has no thinking option: leave {param} out", param=param
    )


def _control_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, int]:
    """Return the ids of the texts that are a single control token."""
    start = len(tokenizer.encode(""))
    found = {}
    for text in texts:
        ids = tokenizer.encode(text)[start:]
        if len(ids) == 1 and not tokenizer.piece(ids[0]):
            found[text] = ids[0]
    return found
