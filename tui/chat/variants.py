"""What a comparison compares: models and settings, a line each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import SamplingParams
from localgen.chat import parameters
from localgen.chat.session import BUILT_IN
from localgen.chat.session_store import Kept

MOST = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """model: None for the built-in one. settings: what is set on top, as typed."""

    model: str | None
    params: SamplingParams
    label: str


def variants(text: str, params: SamplingParams, *, is_elsewhere: bool = False) -> list[Variant]:
    """One of each line: a model, then NAME=VALUE settings. params: what they start from.

    is_elsewhere: the models are another server's. InvalidRequest names the line.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not 2 <= len(lines) <= MOST:
        raise InvalidRequest(f"give 2 to {MOST} lines, a model each; there are {len(lines)}")
    found = []
    for number, line in lines:
        try:
            found.append(_variant(line, params, is_elsewhere))
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}") from error
    return found


def sessions(base: Kept, compared: list[Variant]) -> list[Kept]:
    """A session for each, which goes on from the same conversation."""
    name = base.name or "Comparison"
    return [
        replace(
            base,
            name=f"{name} · {variant.label}",
            model=variant.model,
            params=variant.params,
            ctx=base.ctx if variant.model == base.model else None,
            growing=None,
        )
        for variant in compared
    ]


def _variant(line: str, params: SamplingParams, is_elsewhere: bool) -> Variant:
    try:
        model, *settings = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest("close the quote") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not value:
            raise InvalidRequest(f"{setting}: give NAME=VALUE, such as temperature=0")
        params = parameters.with_parameter(params, name, value, checked=not is_elsewhere)
    named = None if model == BUILT_IN and not is_elsewhere else model
    return Variant(named, params, " ".join([model, *settings]))
