"""Chat templates: the model's own Jinja text, rendered in an immutable sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message, ToolCall

_SHORT_ID = 9
# a template is foreign code, and other requests wait for their turn
MAX_RENDER_S = 5.0


class _Arguments(dict[str, Any]):
    """Arguments of a call: a mapping, and JSON where a template writes them as they are."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def conversation(messages: Sequence[Message], *, short_ids: bool) -> list[dict[str, Any]]:
    """One dict a message. short_ids: ids of calls are brought to nine letters and digits."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_turn(message, names, short_ids) for message in messages]


def with_text_arguments(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of calls as JSON text."""
    return [
        turn | {"tool_calls": [_with_text(call) for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]


def _turn(message: Message, names: dict[str, str], short_ids: bool) -> dict[str, Any]:
    """Only with the fields that it has: templates ask whether they are there."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, short_ids) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _id(message.tool_call_id, short_ids)
    name = message.name or names.get(message.tool_call_id or "")
    if name:
        turn["name"] = name
    return turn


def _call(call: ToolCall, short_ids: bool) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _Arguments(json.loads(call.arguments or "{}"))}
    return {"id": _id(call.id, short_ids), "type": "function", "function": function}


def _id(text: str, short_ids: bool) -> str:
    """Mistral's templates refuse ids of another length, such as other servers give."""
    if not short_ids or (len(text) == _SHORT_ID and text.isalnum() and text.isascii()):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT_ID]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": str(function["arguments"])}}


class Overtime(Exception):
    """The time is up."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Overtime if the block runs longer than that.

    It is raised between two bytecodes: an endless loop in Python ends, a call into C does
    not end before it returns.
    """
    watch = _Watch(threading.get_ident())
    timer = threading.Timer(seconds, watch.strike)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        watch.leave()


class _Watch:
    def __init__(self, thread_id: int) -> None:
        self._thread_id = ctypes.c_ulong(thread_id)
        self._lock = threading.Lock()
        self._left = False

    def strike(self) -> None:
        with self._lock:
            if not self._left:
                self._raise_in_thread(ctypes.py_object(Overtime))

    def leave(self) -> None:
        with self._lock:
            self._left = True
            self._raise_in_thread(None)  # one that has not arrived yet comes too late

    def _raise_in_thread(self, kind: ctypes.py_object[type[Overtime]] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, kind)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template.

    source: Jinja text as in GGUF `tokenizer.chat_template`. bos and eos: the texts that it
    knows as bos_token and eos_token. InvalidRequest if the source does not compile.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._read = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template does not compile: {error}: "
                "give another with --chat-template FILE"
            ) from error
        self.source = source
        self._variables: dict[str, Any] = {
            "bos_token": bos,
            "eos_token": eos,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable of that name."""
        return variable in self._read

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        in_system: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for an answer to these messages. InvalidRequest if the template objects.

        variables: further ones for the template; in_system: further fields of the system message.
        """
        turns = conversation(messages, short_ids="length 9" in self.source)
        if in_system:
            turns[0] |= in_system
        try:
            return self._rendered(turns, variables or {})
        except InvalidRequest:
            if not any(message.tool_calls for message in messages):
                raise
            # some templates want the arguments of calls as text
            return self._rendered(with_text_arguments(turns), variables or {})

    def _rendered(self, turns: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            with deadline(MAX_RENDER_S):
                return self._template.render({**self._variables, **variables, "messages": turns})
        except Overtime as error:
            raise InvalidRequest(
                f"the chat template does not come to an end within {MAX_RENDER_S:g} s: "
                "give another with --chat-template FILE",
                param="messages",
            ) from error
        except _Refused as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # a template is foreign code: it can raise anything
            raise InvalidRequest(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


class _Refused(Exception):
    """Raised by a template through raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
