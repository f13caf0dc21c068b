"""A client of the server of this user; it starts one if there is none."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

import localgen
from localgen import PROTOCOL
from localgen.backends.errors import ServerUnavailable
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client.launch import SERVER_COMMAND, start_lock, start_server, wait_for_shutdown
from localgen.client.protocol import (
    encode_json,
    message_fields,
    parse_completion_stream,
    parse_error_response,
    parse_health,
    raise_for_error,
    sampling_fields,
)
from localgen.client.responses import (
    Completion,
    EmbeddingResult,
    Health,
    ModelCard,
    RunningModel,
    TextDelta,
)
from localgen.client.sockets import AbortableSockets
from localgen.client.sse import DONE, iter_sse_data
from localgen.config import ServerSettings
from localgen.hub.resolve import draft_for_server, installed_models, name_for_server

_HEALTH_TIMEOUT_S = 10.0
_JSON_HEADERS = {"Content-Type": "application/json"}


class Client:
    """One session. notify: gets one line when something happens that a user should know.

    Methods raise LocalgenError: what the server reports, or ServerUnavailable.
    server_command: what starts a server.
    """

    url = ""

    def __init__(
        self,
        settings: ServerSettings | None = None,
        notify: Callable[[str], None] = lambda line: None,
        *,
        server_command: Sequence[str] = SERVER_COMMAND,
    ) -> None:
        self._settings = settings or ServerSettings.from_environment()
        self._notify = notify
        self._server_command = server_command
        self._session_id = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._sockets = AbortableSockets()
        self._http = self._create_http_client()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a request that runs on one is cancelled."""
        self._http.close()

    def abort(self) -> None:
        """From another thread: what runs ends with a LocalgenError, as does all that follows."""
        self._sockets.abort()

    def connect(self) -> None:
        """See to it that a server of our version runs."""
        self._settings.create_dirs()
        found = self.health()
        if found is None:
            self._start_server()
        elif found.protocol != PROTOCOL or found.version != localgen.__version__:
            self._handle_version_mismatch(found)

    def health(self) -> Health | None:
        """Who answers, at work or still loading its first model; None: no server, or one that
        leaves."""
        try:
            reply = self._http.get("/health", timeout=_HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return None
        found = parse_health(reply.status_code, reply.content)
        return None if found.status == "stopping" else found

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Load a model unless it is loaded; on_progress gets the share done, 0 to 1.

        keep_alive: how long it stays when idle, as `30s`; None: as the server thinks fit.
        """
        body = {
            "model": name_for_server(model),
            "options": _load_options_body(options),
            "stream": True,
        }
        if keep_alive is not None:
            body["keep_alive"] = keep_alive
        for event in self._events("/v1/models/load", body):
            if event == DONE:
                break
            reply = raise_for_error(msgspec.json.decode(event))
            if "model" in reply:
                return msgspec.json.decode(event, type=_LoadResponse).model
            on_progress(reply["progress"])
        raise ServerUnavailable(f"the server went away while loading: see {self._log_path}")

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
        turns = [message_fields(message) for message in messages]
        body = {"messages": turns, **sampling_fields(params, chat=True)}
        return self._generate("/v1/chat/completions", body, model, ctx, priority)

    def complete(
        self,
        model: str | None,
        prompt: str,
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
    ) -> Generator[TextDelta | Completion, None, None]:
        """As chat, for text that is continued as it stands."""
        body = {"prompt": prompt, **sampling_fields(params, chat=False)}
        return self._generate("/v1/completions", body, model, ctx, priority)

    def embed(
        self, model: str | None, texts: Sequence[str], *, dimensions: int | None = None
    ) -> EmbeddingResult:
        """Vectors of texts. dimensions: elements of each; None: as many as the model has."""
        body: dict[str, Any] = {"model": name_for_server(model), "input": list(texts)}
        if dimensions is not None:
            body["dimensions"] = dimensions
        reply = self._post("/v1/embeddings", body)
        vectors = tuple(tuple(entry["embedding"]) for entry in reply["data"])
        return EmbeddingResult(reply["model"], vectors, reply["usage"]["prompt_tokens"])

    def models(self) -> list[ModelCard]:
        """Every model that can be named, and those loaded; starts no server."""
        if self.health() is None:
            return [
                ModelCard(file.name, str(file.path), file.size_bytes, "available", file.source)
                for file in installed_models()
            ]
        cards = self._get("/v1/models")["data"]
        return [msgspec.convert(card | {"name": card["id"]}, ModelCard) for card in cards]

    def running_models(self) -> list[RunningModel]:
        """Models in memory; none without a server."""
        if self.health() is None:
            return []
        return [msgspec.convert(model, RunningModel) for model in self.stats()["models"]]

    def stats(self) -> dict[str, Any]:
        """Server and models at this moment. ServerUnavailable: no server."""
        return self._get("/v1/stats")

    def stream_stats(self) -> Iterator[dict[str, Any]]:
        """stats() again and again, a few times a second, until closed or the server leaves."""
        path, silence = "/v1/stats?stream=true", httpx.Timeout(_HEALTH_TIMEOUT_S)
        with self._translate_errors(), self._http.stream("GET", path, timeout=silence) as reply:
            self._raise_for_status(reply)
            for event in iter_sse_data(reply.iter_raw()):
                if event == DONE:
                    return
                yield raise_for_error(msgspec.json.decode(event))

    def cancel(self, request_id: str) -> bool:
        """End a request of any client of this server; False: it has ended. Starts no server."""
        path = f"/v1/requests/{quote(request_id, safe='')}/cancel"
        return bool(self._post(path, {})["cancelled"])

    def unload(self, model: str) -> bool:
        """Unload a model, in use or not; False: it was not loaded."""
        if self.health() is None:
            return False
        return bool(self._post("/v1/models/unload", {"model": name_for_server(model)})["unloaded"])

    def shutdown(self) -> bool:
        """End the server and wait until it has left; False: there was none."""
        if self.health() is None:
            return False
        self._post("/v1/shutdown", {})
        if not wait_for_shutdown(self._settings, self._is_aborted):
            raise ServerUnavailable(f"the server does not end: see {self._log_path}")
        return True

    @property
    def _log_path(self) -> str:
        return str(self._settings.log_path)

    def _is_aborted(self) -> bool:
        return self._sockets.is_aborted

    def _create_http_client(self) -> httpx.Client:
        # the socket is on this machine: no proxy, and an answer takes as long as it takes
        return httpx.Client(
            base_url="http://localgen",
            transport=httpx.HTTPTransport(uds=str(self._settings.socket_path)),
            timeout=httpx.Timeout(None, connect=_HEALTH_TIMEOUT_S),
            headers={"X-Localgen-Session": self._session_id},
            event_hooks={"request": [self._sockets.track_request]},
            trust_env=False,
        )

    def _start_server(self) -> None:
        def answers() -> bool:
            return self.health() is not None

        with start_lock(self._settings, self._is_aborted):
            if answers():
                return  # another client was faster
            self._notify("starting the server")
            start_server(self._settings, self._server_command, answers, self._is_aborted)

    def _handle_version_mismatch(self, health: Health) -> None:
        ours = f"localgen {localgen.__version__}"
        theirs = f"the running server is {health.version}"
        newer = _version_key(localgen.__version__) > _version_key(health.version)
        same_protocol = health.protocol == PROTOCOL
        if health.active_requests == 0 and (newer or not same_protocol):
            self._notify(f"{theirs}, this is {ours}: restarting it")
            self.shutdown()
            self._start_server()
        elif same_protocol:
            busy = (
                f", busy with {health.active_requests} requests" if health.active_requests else ""
            )
            self._notify(f"{theirs}{busy}, this is {ours}")
        else:
            raise ServerUnavailable(
                f"{theirs} and busy, {ours} does not speak its protocol: wait, "
                f"or end it (process {health.pid})"
            )

    def _generate(
        self, path: str, body: dict[str, Any], model: str | None, ctx: int | None, priority: int
    ) -> Generator[TextDelta | Completion, None, None]:
        asked = {"stream": True, "stream_options": {"include_usage": True}, "priority": priority}
        with contextlib.closing(
            self._events(path, body | asked | {"model": name_for_server(model), "ctx": ctx})
        ) as events:
            yield from parse_completion_stream(events)

    def _events(self, path: str, body: dict[str, Any]) -> Generator[bytes, None, None]:
        """The events that answer a request; closing the generator disconnects, which cancels."""
        with self._translate_errors(), self._open_stream(path, encode_json(body)) as reply:
            yield from iter_sse_data(reply.iter_raw())

    @contextlib.contextmanager
    def _open_stream(self, path: str, body: bytes) -> Iterator[httpx.Response]:
        with contextlib.ExitStack() as stack:
            try:
                reply = stack.enter_context(self._post_stream(path, body))
            except (httpx.NetworkError, httpx.RemoteProtocolError, ServerUnavailable):
                if self._sockets.is_aborted:
                    raise
                # it was idle and left, or is about to: nothing was answered, so ask another one
                self._http.close()  # these connections lead to the one that leaves
                self._http = self._create_http_client()
                self.connect()
                reply = stack.enter_context(self._post_stream(path, body))
            yield reply

    @contextlib.contextmanager
    def _post_stream(self, path: str, body: bytes) -> Iterator[httpx.Response]:
        with self._http.stream("POST", path, content=body, headers=_JSON_HEADERS) as reply:
            self._raise_for_status(reply)
            yield reply

    def _get(self, path: str) -> dict[str, Any]:
        with self._translate_errors():
            return self._decode_json(self._http.get(path))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._translate_errors():
            return self._decode_json(
                self._http.post(path, content=encode_json(body), headers=_JSON_HEADERS)
            )

    def _decode_json(self, reply: httpx.Response) -> dict[str, Any]:
        self._raise_for_status(reply)
        whole: dict[str, Any] = msgspec.json.decode(reply.content)
        return whole

    def _raise_for_status(self, reply: httpx.Response) -> None:
        if reply.status_code != 200:
            raise parse_error_response(reply.status_code, reply.read())

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServerUnavailable(f"no server answers on {self._settings.socket_path}") from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"the server went away in mid-answer: see {self._log_path}"
            ) from error


class _LoadResponse(msgspec.Struct):
    model: ModelInfo


def _load_options_body(options: LoadOptions) -> dict[str, Any]:
    options = replace(options, draft=draft_for_server(options.draft))
    return {name: value for name, value in asdict(options).items() if value is not None}


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
