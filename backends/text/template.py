"""Chat templates: the model's Jinja template, rendered in an immutable sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Message, ToolCall

_SHORT_ID = 9
# templates are untrusted code, and rendering blocks other requests
MAX_RENDER_S = 5.0


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


class DeadlineExceeded(Exception):
    """Raised in a `deadline` block that runs too long."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineExceeded in the block if it runs longer than `seconds`.

    It is raised between two bytecodes: this ends an endless loop in Python, but a call into C only
    after it returns.
    """
    watch = _DeadlineTimer(threading.get_ident())
    timer = threading.Timer(seconds, watch.expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        watch.cancel()


class _DeadlineTimer:
    def __init__(self, thread_id: int) -> None:
        self._thread_id = ctypes.c_ulong(thread_id)
        self._lock = threading.Lock()
        self._is_cancelled = False

    def expire(self) -> None:
        with self._lock:
            if not self._is_cancelled:
                self._raise_in_thread(ctypes.py_object(DeadlineExceeded))

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            self._raise_in_thread(None)  # clear a pending exception

    def _raise_in_thread(self, kind: ctypes.py_object[type[DeadlineExceeded]] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, kind)


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}…{% endgeneration %}`, a marker for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

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
        except jinja2.TemplateError as error:
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

    def uses_variable(self, variable: str) -> bool:
        """Return True if the template reads this variable."""
        return variable in self._used_variables

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
            with deadline(MAX_RENDER_S):
                return self._template.render({**self._variables, **variables, "messages": turns})
        except DeadlineExceeded as error:
            raise InvalidRequest(
                f"the chat template did not finish within {MAX_RENDER_S:g} s: "
                "use another with --chat-template FILE",
                param="messages",
            ) from error
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


def load_template(
    requested: str | None, own: str | None, tokenizer: Tokenizer, path: Path
) -> tuple[ChatTemplate | None, str | None]:
    """Return the chat template and its source: the requested one, else the model's own, if any.

    Raises InvalidRequest if the requested template is invalid, LoadFailed if that of the model at
    `path` is.
    """
    source = requested or own
    if source is None:
        return None, None
    try:
        return ChatTemplate(source, bos=tokenizer.bos, eos=tokenizer.eos), source
    except InvalidRequest as error:
        if requested:
            raise
        raise LoadFailed(f"cannot load {path}: {error}") from error
