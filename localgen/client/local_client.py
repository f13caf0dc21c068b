"""The client of the local server, over its Unix socket, which it starts if necessary."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

import localgen
from localgen import PROTOCOL
from localgen.backends.errors import LocalgenError, ModelNotFound, ServerUnavailable
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.typed_data import decode_json
from localgen.client.client import Client
from localgen.client.connection import HEALTH_TIMEOUT_S, LocalConnection, ServerResponse
from localgen.client.errors import LIST_TIMEOUT_S, ErrorResponse, ServerNotAnswering
from localgen.client.launch import (
    SERVER_COMMAND,
    EarlyLaunch,
    LaunchedServer,
    ServerKilled,
    is_being_started,
    read_server_pid,
    start_lock,
    wait_for_shutdown,
)
from localgen.client.local_replies import (
    Cancelled,
    Embeddings,
    LoadEvent,
    ModelList,
    PrivatePortReply,
    RunningModels,
    Stats,
    Unloaded,
)
from localgen.client.request_body import OpenAICompat, encode_json
from localgen.client.responses import ADAPTER, PRESET, Health, ModelCard, RunningModel
from localgen.client.stream import DONE, iter_sse_data
from localgen.config import ServerSettings
from localgen.hub.hf_client import cache_folder
from localgen.hub.models_file import read_models_file
from localgen.hub.resolve import (
    draft_for_server,
    installed_adapters,
    installed_aliases,
    installed_models,
    installed_presets,
    name_for_server,
)

# texts per request: the first embeddings arrive before the last ones are computed
_EMBED_TEXTS = 64
_Reply = TypeVar("_Reply")


class LocalClient(Client):
    """The client of the local server, with operations on the server itself.

    notify: called with a line when the user should know something. server_command: starts a server.
    early: a server that connect() waits for.

    Methods raise BadSetting if another user could replace the socket, and ServerNotAnswering if a
    server runs but does not answer, except for the time that an answer takes.
    """

    _connection: LocalConnection

    def __init__(
        self,
        settings: ServerSettings | None = None,
        notify: Callable[[str], None] = lambda line: None,
        *,
        server_command: Sequence[str] = SERVER_COMMAND,
        early: EarlyLaunch | None = None,
    ) -> None:
        self._settings = settings or ServerSettings.from_environment()
        self._server_command, self._early = server_command, early
        super().__init__(LocalConnection(self._settings, notify))
        self._compat = OpenAICompat(owned_by="localgen", is_local=True)

    def connect(self) -> None:
        """Start a server if none runs; restart an idle one of an older version."""
        self._settings.create_dirs()
        if self._early is not None:
            early, self._early = self._early, None
            with early.lock:
                return self._await_start(early.server)
        try:
            health = self.health()
        except ServerNotAnswering:
            if not is_being_started(self._settings):
                raise
            with start_lock(self._settings, self._is_aborted):
                health = self.health()
        if health is None:
            self._start_server()
        elif health.protocol != PROTOCOL or health.version != localgen.__version__:
            self._handle_version_mismatch(health)

    def health(self) -> Health | None:
        """The server's health, ready or loading; None if none runs or it is shutting down.

        Raises ServerNotAnswering after 5 s.
        """
        return self._connection.health()

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Load a model unless it is loaded, and return its metadata; see Client.load."""
        body = {
            "model": name_for_server(model),
            "options": _load_options_body(options),
            "stream": True,
        }
        if keep_alive is not None:
            body["keep_alive"] = keep_alive
        waiting, told_s = "", 0.0
        with self._post("models/load", encode_json(body)) as reply:
            for event in self._events(self._accepted(reply), LoadEvent):
                if event.model is not None:
                    return event.model
                if not waiting and (waiting := event.waiting):
                    self._connection.notify(f"waiting: {waiting}")
                if event.silent_s is not None and event.silent_s >= 2 * told_s:
                    told_s = event.silent_s
                    self._on_silence(told_s)
                on_progress(event.progress)
        raise ServerUnavailable(
            f"the server ended while loading the model: see {self._settings.log_path}"
        )

    def embed(
        self, model: str | None, texts: Sequence[str], dimensions: int | None = None
    ) -> Iterator[list[float]]:
        """Yield the embeddings of texts, of length 1. dimensions: elements of each, or None for
        all."""
        for start in range(0, len(texts), _EMBED_TEXTS):
            batch = texts[start : start + _EMBED_TEXTS]
            try:
                vectors = self._embed_batch(model, batch, dimensions)
            except LocalgenError as error:
                # the server counts the texts of a request
                place = f"texts {start + 1} to {start + len(batch)}: " if start else ""
                raise type(error)(f"{place}{error.message}", param=error.param) from error
            yield from vectors

    def _embed_batch(
        self, model: str | None, texts: Sequence[str], dimensions: int | None
    ) -> list[list[float]]:
        body = {"model": name_for_server(model), "input": list(texts), "dimensions": dimensions}
        with self._post("embeddings", encode_json(body)) as reply:
            vectors = b"".join(self._accepted(reply).iter_bytes())
        return [row.embedding for row in self._decode(vectors, Embeddings).data]

    def models(self) -> list[ModelCard]:
        """Installed and loaded models, their aliases and presets. Does not start a server."""
        if self.health() is None:
            return installed_cards()
        return self._decode(self._get_body("models", LIST_TIMEOUT_S), ModelList).cards()

    def running_models(self) -> list[RunningModel]:
        """The loaded models; none without a server."""
        if self.health() is None:
            return []
        return self._decode(self._get_body("stats", HEALTH_TIMEOUT_S), RunningModels).models

    def stats(self) -> dict[str, Any]:
        """Server and models at this moment. Raises ServerUnavailable if no server runs."""
        body = self._get_body("stats", HEALTH_TIMEOUT_S)
        self._decode(body, Stats)
        return self._decode(body, dict[str, Any])

    def stream_stats(self) -> Iterator[dict[str, Any]]:
        """Yield stats() several times a second until closed, or until the server shuts down."""
        with self._connection.get("stats?stream=true", HEALTH_TIMEOUT_S) as reply:
            yield from self._events(self._accepted(reply), dict[str, Any])

    def cancel(self, request_id: str) -> bool:
        """Cancel a request of any client; False if it has ended. Does not start a server."""
        path = f"requests/{quote(request_id, safe='')}/cancel"
        return self._command(path, {}, Cancelled).cancelled

    def unload(self, model: str) -> bool:
        """Unload a model, even one in use; False if it was not loaded."""
        if self.health() is None:
            return False
        return self._command("models/unload", {"model": name_for_server(model)}, Unloaded).unloaded

    def shutdown(self) -> bool:
        """Shut the server down and wait for its end; False if none runs."""
        if self.health() is None:
            return False
        self._command("shutdown", {}, dict[str, Any])
        if not wait_for_shutdown(self._settings, self._is_aborted):
            pid = read_server_pid(self._settings)
            raise ServerUnavailable(
                f"the server did not exit: see {self._settings.log_path}, or `kill -9 {pid}`"
            )
        return True

    @contextlib.contextmanager
    def private_port(self, *, stabilize: bool = False) -> Iterator[PrivatePortReply]:
        """A loopback port of the server with a key of its own, until the block ends.

        stabilize: the requests that come there (backends/text/stabilizer.py).
        """
        query = "?stabilize=true" if stabilize else ""
        with self._post(f"private-port{query}", b"{}") as reply:
            events = self._events(self._accepted(reply), PrivatePortReply)
            yield next(events)

    def _is_aborted(self) -> bool:
        return self._connection.is_aborted

    def _start_server(self) -> None:
        with start_lock(self._settings, self._is_aborted):
            if self.health() is None:  # else another client was faster
                self._await_start(LaunchedServer(self._settings, self._server_command))

    def _await_start(self, server: LaunchedServer) -> None:
        """Wait until the server answers; start it again once if a signal ended it."""

        def answers() -> bool:
            try:
                return self.health() is not None
            except ServerNotAnswering:  # it listens before it has imported what it needs
                return False

        self._connection.notify("starting the server")
        try:
            server.wait(answers, self._is_aborted)
        except ServerKilled as error:
            self._connection.notify(f"{error.message}; starting it again")
            again = LaunchedServer(self._settings, self._server_command)
            again.wait(answers, self._is_aborted)

    def _handle_version_mismatch(self, health: Health) -> None:
        ours = f"localgen {localgen.__version__}"
        theirs = f"the running server is {health.version}"
        newer = _version_key(localgen.__version__) > _version_key(health.version)
        same_protocol = health.protocol == PROTOCOL
        if health.active_requests == 0 and (newer or not same_protocol):
            self._connection.notify(f"{theirs}, this is {ours}: restarting it")
            self.shutdown()
            self._start_server()
        elif same_protocol:
            busy = (
                f", busy with {health.active_requests} requests" if health.active_requests else ""
            )
            self._connection.notify(f"{theirs}{busy}, this is {ours}")
        else:
            raise ServerUnavailable(
                f"{theirs} and busy, {ours} does not speak its protocol: wait, "
                f"or end process {health.pid}"
            )

    def _name_on_server(self, model: str | None) -> str | None:
        return name_for_server(model)

    @contextlib.contextmanager
    def _post(self, path: str, body: bytes) -> Iterator[ServerResponse | ErrorResponse]:
        """Send a request; start a new server if the old one was about to exit."""
        with contextlib.ExitStack() as stack:
            try:
                reply = stack.enter_context(super()._post(path, body))
                if isinstance(reply, ErrorResponse):
                    self._check_refusal(reply, body)
            except ServerUnavailable as error:
                if self._is_aborted() or isinstance(error.__cause__, httpx.TimeoutException):
                    raise
                # the server was idle and shut down: it has not answered, so the request is safe
                # to repeat, on new connections
                stack.close()
                self._connection.reopen()
                self.connect()
                reply = stack.enter_context(super()._post(path, body))
            yield reply

    def _check_refusal(self, refusal: ErrorResponse, body: bytes) -> None:
        """Raises the error if it says that the server, or a model in its cache, is not there.

        body: the refused request.
        """
        error = self._connection.errors.refusal(refusal)
        if isinstance(error, ServerUnavailable):
            raise error
        if not isinstance(error, ModelNotFound):
            return
        is_at_path = Path(decode_json(body, dict[str, Any]).get("model") or "").is_absolute()
        if not is_at_path and (note := self._other_cache_note()):
            raise ModelNotFound(f"{error.message}; {note}", param=error.param)

    def _other_cache_note(self) -> str:
        """Empty unless the server looks for models in another cache folder than this process."""
        try:
            health = self.health()
        except LocalgenError:
            return ""
        ours, theirs = cache_folder().absolute(), health.cache_folder if health else ""
        if not theirs or Path(theirs).resolve() == ours.resolve():
            return ""
        return (
            f"the running server looks in {theirs}, not in {ours}: "
            f"`localgen stop` ends it, and the next one looks in {ours}"
        )

    def _events(self, response: ServerResponse, kind: type[_Reply]) -> Iterator[_Reply]:
        """The decoded events of a stream. Raises the error that one of them reports."""
        for event in iter_sse_data(response.iter_bytes()):
            if event == DONE:
                return
            if "error" in self._decode(event, dict[str, Any]):
                raise self._connection.errors.stream_error(event)
            yield self._decode(event, kind)

    def _get_body(self, path: str, timeout_s: float) -> bytes:
        with self._connection.get(path, timeout_s) as reply:
            return self._accepted(reply).read()

    def _command(self, path: str, body: dict[str, Any], kind: type[_Reply]) -> _Reply:
        """Send a command, which starts no server."""
        with self._connection.post(path, encode_json(body)) as reply:
            return self._decode(self._accepted(reply).read(), kind)

    def _decode(self, body: bytes, kind: type[_Reply]) -> _Reply:
        return self._connection.errors.decode(body, kind)


def installed_cards(state: str = "available") -> list[ModelCard]:
    """Installed models and their other names, as the disk has them. state: of each."""
    named = [*((file.name, file) for file in installed_models()), *installed_aliases()]
    adapters = read_models_file().adapters
    return [
        *(ModelCard(name, str(f.path), f.size_bytes, state, f.source) for name, f in named),
        *(
            ModelCard(name, str(f.path), f.size_bytes, state, PRESET)
            for name, f in installed_presets()
        ),
        *(
            ModelCard(name, str(f.path), adapters[name].size_bytes, state, ADAPTER)
            for name, f in installed_adapters()
        ),
    ]


def _load_options_body(options: LoadOptions) -> dict[str, Any]:
    options = replace(options, draft=draft_for_server(options.draft))
    return {name: value for name, value in asdict(options).items() if value is not None}


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
