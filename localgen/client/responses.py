"""Values that clients return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localgen.backends.engine_stats import AdapterStats
from localgen.backends.types import Timings, ToolCall


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """A token that was possible at some place. probability: of the model, from 0 to 1."""

    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer. num_tokens: tokens generated so far.

    reasoning: new reasoning text. estimated: num_tokens is the number of chunks, because the server
    reports no token counts. prompt_tokens: of the whole prompt, or None if not reported.
    alternatives: at the place of its first token, the most probable first, if requested.
    """

    text: str
    num_tokens: int
    reasoning: str = ""
    estimated: bool = False
    prompt_tokens: int | None = None
    alternatives: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an answer. Fields as in Finished, or None if not reported by the server.

    estimated: completion_tokens is the number of chunks. client_measured: timings are measured by
    the client, including the network; then only ttft_ms, predicted_ms, predicted_per_second and
    the token counts are known. tool_calls: of an answer that ends with them.
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
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def total_tokens(self) -> int | None:
        """Prompt and completion tokens; None if the prompt's are unknown."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens


# sources of cards whose names are presets and adapters of models.toml
PRESET, ADAPTER = "preset", "adapter"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be requested.

    state: available, loading or loaded. source: built-in, package, file, cache, preset or adapter;
    url on a remote server. path: of the model, as size_bytes, which for an adapter is its own.
    """

    name: str
    path: str
    size_bytes: int
    state: str
    source: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole answer to a request, or the error of the server. request_id: of its log."""

    status: int
    request_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A loaded or loading model. draft: its draft model, if any. pid: of its engine process.

    size_bytes: of the weights. memory_bytes: RAM and GPU memory that the engine process takes now.
    until_s: seconds until it is unloaded if it stays idle, or None if never. silent_s: how long its
    engine has sent nothing, although it should, or None if it answers. state: loaded, or loading
    with `progress` (0 to 1); processor and ctx are empty then. adapters: LoRA adapters in its
    memory. aliases: filled in by `localgen ps`.
    """

    name: str
    id: str
    size_bytes: int
    processor: str
    ctx: int
    until_s: float | None
    active_requests: int
    draft: str = ""
    pid: int = 0
    memory_bytes: int = 0
    silent_s: float | None = None
    state: str = "loaded"
    progress: float = 1.0
    path: str = ""
    adapters: tuple[AdapterStats, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """A server's health. protocol: version of the API between client and server.

    cache_folder: where it looks for downloaded models. The first versions did not report these.
    """

    status: str
    version: str
    pid: int
    active_requests: int
    protocol: int = 0
    cache_folder: str = ""


def silence_notice(model: str, silent_s: float) -> str:
    """Return the notice about a model whose engine sends nothing."""
    return (
        f"no answer of the engine of {model} for {silent_s:.0f} s: a long step, or it hangs; "
        f"localgen stop {model} ends it"
    )
