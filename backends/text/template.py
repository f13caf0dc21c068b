"""Chat templates: the model's Jinja template, rendered in an immutable sandbox."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError
from localgen.backends.sandbox import LimitExceeded, Sandbox
from localgen.backends.sandbox_worker import CallLimits
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Message, ToolCall

_SHORT_ID = 9
# of compiling a template, and of rendering it once
TEMPLATE_LIMITS = CallLimits(seconds=2.0)


class PromptTemplate(Protocol):
    """A chat template that renders prompts. Thread-safe. source: its Jinja source."""

    source: str

    def uses_variable(self, variable: str) -> bool:
        """Return True if the template reads this variable."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        system_fields: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt for these messages. Raises InvalidRequest if the template fails.

        variables: additional template variables. system_fields: additional fields of the system
        message.
        """
        ...


class _CallArguments(dict[str, Any]):
    """Arguments of a tool call: a mapping that is printed as JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def template_messages(messages: Sequence[Message], *, use_short_ids: bool) -> list[dict[str, Any]]:
    """Convert messages to dicts. use_short_ids: convert call ids to nine letters and digits."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_template_message(message, names, use_short_ids) for message in messages]


def with_text_arguments(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool call arguments as JSON text."""
    return [
        turn | {"tool_calls": [_with_json_arguments(call) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]


def _template_message(
    message: Message, function_names: dict[str, str], use_short_ids: bool
) -> dict[str, Any]:
    """Include only fields that are set: templates test whether a field is defined."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            _template_tool_call(call, use_short_ids) for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _tool_call_id(message.tool_call_id, use_short_ids)
    name = message.name or function_names.get(message.tool_call_id or "")
    if name:
        turn["name"] = name
    return turn


def _template_tool_call(call: ToolCall, use_short_ids: bool) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _CallArguments(json.loads(call.arguments or "{}"))}
    return {"id": _tool_call_id(call.id, use_short_ids), "type": "function", "function": function}


def _tool_call_id(text: str, use_short_ids: bool) -> str:
    """Shorten the id for Mistral's templates, which reject any other length."""
    if not use_short_ids or (len(text) == _SHORT_ID and text.isalnum() and text.isascii()):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": str(function["arguments"])}}


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}…{% endgeneration %}`, a marker for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A PromptTemplate of this process, without limits of time and memory.

    source: Jinja source, as in GGUF `tokenizer.chat_template`. bos, eos: the values of bos_token
    and eos_token. Raises InvalidRequest if the source does not compile.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._used_variables = meta.find_undeclared_variables(environment.parse(source))
        except MemoryError:
            raise
        except Exception as error:  # besides TemplateError, nesting that Python does not compile
            raise InvalidRequest(
                f"the chat template does not compile: {error}: "
                "use another with --chat-template FILE"
            ) from error
        self.source = source
        self._variables: dict[str, Any] = {
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }

    def used_variables(self) -> list[str]:
        """All variables that the template reads."""
        return sorted(self._used_variables)

    def uses_variable(self, variable: str) -> bool:
        return variable in self._used_variables

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        system_fields: Mapping[str, Any] | None = None,
    ) -> str:
        turns = template_messages(messages, use_short_ids="length 9" in self.source)
        if system_fields:
            turns[0] |= system_fields
        try:
            return self._render(turns, variables or {})
        except InvalidRequest:
            if not any(message.tool_calls for message in messages):
                raise
            # some templates expect tool call arguments as text
            return self._render(with_text_arguments(turns), variables or {})

    def _render(self, turns: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**self._variables, **variables, "messages": turns})
        except MemoryError:
            raise
        except _TemplateRefusal as error:
            raise InvalidRequest(
                f"the chat template rejects these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # a template is untrusted code and can raise anything
            raise InvalidRequest(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


class _TemplateRefusal(Exception):
    """Raised by a template through raise_exception()."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's tojson filter escapes for HTML, which models were not trained on
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class SandboxedTemplate:
    """A PromptTemplate that runs in a sandbox. Arguments and errors as in ChatTemplate.

    Also raises InvalidRequest if it exceeds the limits for a single short message: no request would
    succeed.
    """

    def __init__(self, sandbox: Sandbox, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        try:
            self._template = sandbox.create(TEMPLATE_LIMITS, _new_template, source, bos, eos)
            self._used_variables = frozenset(self._template.call(TEMPLATE_LIMITS, "used_variables"))
            with contextlib.suppress(LocalgenError):  # it may reject a message without others
                self._template.call(TEMPLATE_LIMITS, "render", [Message("user", "hello")])
        except LimitExceeded as error:
            raise _limit_exceeded(error, "use another with --chat-template FILE") from error

    def uses_variable(self, variable: str) -> bool:
        return variable in self._used_variables

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        system_fields: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return str(
                self._template.call(TEMPLATE_LIMITS, "render", messages, variables, system_fields)
            )
        except LimitExceeded as error:
            # the model stays loaded with it
            remedy = "`localgen stop` the model, then load it with another --chat-template FILE"
            raise _limit_exceeded(error, remedy) from error


def _new_template(source: str, bos: str, eos: str) -> ChatTemplate:
    return ChatTemplate(source, bos=bos, eos=eos)


def _limit_exceeded(error: LimitExceeded, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template {error}: {remedy}", param="messages")


class TemplateLoader:
    """Compiles a model's chat template while the rest of the model is loaded.

    source: that of the requested template, else the model's own; None if there is neither.
    path: the model, to name in errors.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        requested: str | None,
        own: str | None,
        tokenizer: Tokenizer,
        path: Path,
    ) -> None:
        self.source = requested or own
        self._is_requested = bool(requested)
        self._path = path
        self._loading: Future[SandboxedTemplate] | None = None
        if self.source is not None:
            executor = ThreadPoolExecutor(1, thread_name_prefix="template")
            self._loading = executor.submit(
                SandboxedTemplate, sandbox, self.source, bos=tokenizer.bos, eos=tokenizer.eos
            )
            executor.shutdown(wait=False)

    def wait(self) -> PromptTemplate | None:
        """Return the template. Raises InvalidRequest if the requested one is invalid, LoadFailed if
        the model's own is."""
        try:
            return self._loading.result() if self._loading is not None else None
        except InvalidRequest as error:
            if self._is_requested:
                raise
            raise LoadFailed(f"cannot load {self._path}: {error}") from error
