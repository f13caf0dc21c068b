"""Chat templates: the model's own Jinja text, rendered in an immutable sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localgen.backends.errors import InvalidRequest
from localgen.backends.text.conversation import conversation, with_text_arguments
from localgen.backends.text.deadline import Overtime, deadline
from localgen.backends.types import Message

# a template is foreign code, and other requests wait for their turn
MAX_RENDER_S = 5.0


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
