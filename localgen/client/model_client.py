"""What a chat needs of a server, whether it is ours or another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client.responses import Completion, ModelCard, TextDelta


class ModelClient(Protocol):
    """Client speaks to our own server, RemoteClient to any at a URL.

    Methods raise LocalgenError. url: the other server; empty: ours.
    """

    url: str

    def close(self) -> None:
        """Close the connections; a request that runs on one is cancelled."""

    def abort(self) -> None:
        """From another thread: what runs ends with a LocalgenError, as does all that follows."""

    def connect(self) -> None:
        """See to it that requests can be sent."""

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = ...,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """See to it that a model can be asked, and say what is known of it."""

    def chat(
        self,
        model: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
    ) -> Generator[TextDelta | Completion, None, None]:
        """Text as it is generated, then one Completion. Closing the generator cancels the
        request."""

    def models(self) -> list[ModelCard]:
        """The models that can be named."""

    def stats(self) -> dict[str, Any]:
        """The server at this moment."""
