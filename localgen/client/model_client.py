"""The base of clients: one server that speaks OpenAI's protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client.connection import Connection, ServerResponse
from localgen.client.request_body import GenerationRequest, OpenAICompat
from localgen.client.responses import Completion, ModelCard, TextDelta
from localgen.client.stream import read_completion


class ModelClient(ABC):
    """A client of one server: Client of the local one, RemoteClient of any at a URL.

    Methods raise LocalgenError. url: base URL of a remote server; empty for the local one.
    """

    url = ""

    def __init__(
        self, connection: Connection, compat: OpenAICompat, notify: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._compat = compat
        self._notify = notify

    def close(self) -> None:
        """Close the connections, which cancels running requests."""
        self._connection.close()

    def abort(self) -> None:
        """From another thread: end all requests, now and in future, with a LocalgenError."""
        self._connection.abort()

    @abstractmethod
    def connect(self) -> None:
        """Prepare for requests; start the local server if necessary."""

    @abstractmethod
    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Load a model if the server allows it, and return its metadata.

        model: None for the default. on_progress: called with values from 0 to 1. keep_alive: how
        long an idle model stays loaded, e.g. `30s`; None: the server's default.
        """

    def chat(
        self,
        model: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
    ) -> Generator[TextDelta | Completion, None, None]:
        """Stream an answer to a chat, then yield one Completion.

        Closing the generator cancels the request.
        """
        return self._generate(GenerationRequest(model, messages, params, ctx, priority))

    @abstractmethod
    def models(self) -> list[ModelCard]:
        """The models that can be requested."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The server's current statistics."""

    def _generate(
        self, request: GenerationRequest
    ) -> Generator[TextDelta | Completion, None, None]:
        with self._open(request) as response:
            for part in read_completion(response, self._connection.errors, self._on_silence):
                yield self._annotated(part, request) if isinstance(part, Completion) else part

    def _on_silence(self, silent_s: float) -> None:
        self._notify(f"no answer of the engine for {silent_s:.0f} s; Ctrl+C stops")

    @abstractmethod
    def _open(self, request: GenerationRequest) -> AbstractContextManager[ServerResponse]:
        """Send a generation request, again in another form if necessary."""

    def _annotated(self, completion: Completion, request: GenerationRequest) -> Completion:
        """Add what the client knows and the server did not report."""
        return completion
