"""What a client gets from the server."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.types import Timings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, of which num_tokens are now generated in all.

    reasoning: new text of what the model thinks before it answers.
    estimated: whether num_tokens counts the pieces that came, as nobody counts tokens.
    """

    text: str
    num_tokens: int
    reasoning: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an answer. The fields are those of Finished; None: the server does not say.

    estimated: whether completion_tokens counts pieces of text. client_measured: whether timings are
    this client's, the network included; then only ttft_ms, predicted_ms, predicted_per_second and
    the counts of tokens are known.
    """

    model: str
    finish_reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    timings: Timings
    ctx: int | None
    seed: int | None
    stop: str | None
    notes: tuple[str, ...]
    estimated: bool = False
    client_measured: bool = False

    @property
    def total_tokens(self) -> int | None:
        """Tokens of prompt and answer."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens


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
    """A model in memory, with the one that drafts for it, if any.

    until_s: seconds until it is unloaded if nothing uses it; None: never.
    """

    name: str
    id: str
    size_bytes: int
    processor: str
    ctx: int
    until_s: float | None
    active_requests: int
    draft: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """Who answers on the socket. protocol: grows when clients must be newer."""

    status: str
    version: str
    protocol: int
    pid: int
    active_requests: int
