"""What a client gets from the server."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.types import Timings


@dataclass(frozen=True, slots=True)
class Text:
    """New text of an answer, of which num_tokens are now generated in all.

    reasoning: new text of what the model thinks before it answers.
    """

    text: str
    num_tokens: int
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of an answer. The fields are those of Finished."""

    model: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    ctx: int
    seed: int | None
    stop: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be run.

    state: available, loading or loaded. source: built-in, file or cache.
    """

    name: str
    path: str
    size_bytes: int
    state: str
    source: str


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model in memory. until_s: seconds until it is unloaded if nothing uses it; None: never."""

    name: str
    id: str
    size_bytes: int
    processor: str
    ctx: int
    until_s: float | None
    active_requests: int


@dataclass(frozen=True, slots=True)
class Health:
    """Who answers on the socket. protocol: grows when clients must be newer."""

    status: str
    version: str
    protocol: int
    pid: int
    active_requests: int
