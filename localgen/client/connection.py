"""HTTP connections to one server, over TCP or a Unix socket."""

from __future__ import annotations

import contextlib
import email.utils
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import httpx

import localgen
from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.client.endpoints import Endpoint
from localgen.client.errors import (
    CONNECT_TIMEOUT_S,
    LIST_TIMEOUT_S,
    EndpointErrors,
    ErrorResponse,
    LocalErrors,
    ServerErrors,
    ServerNotAnswering,
    is_backlog_full,
)
from localgen.client.responses import Health
from localgen.client.server_watch import ServerWatch
from localgen.client.sockets import AbortableSockets
from localgen.config import BadSetting, ServerSettings

# a longer Retry-After means: try again another day
MAX_RETRY_AFTER_S = 60.0
MAX_RETRIES = 3
_MAX_ERROR_BYTES = 1 << 16
# how long to knock at a local server whose queue of connections is full
_BACKLOG_TIMEOUT_S = 5.0
_BACKLOG_POLL_S = 0.05
# a cluster on a busy machine starts anew within this time
RESTART_WAIT_S = 60.0
_RESTART_POLL_S = 0.2
# of a server at a URL: a body that is read as a whole, or an event of a stream
MAX_MESSAGE_BYTES = 16 << 20
# not below /v1
_HEALTH_URL = "http://localgen/health"
# the local server answers at once, unless it computes an answer
HEALTH_TIMEOUT_S = 5.0
# an answer takes as long as it takes
_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
# requests are limited by the server; httpx would send the 101st only after another has ended
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class MessageTooLong(Exception):
    """A body or an event is larger than MAX_MESSAGE_BYTES. The text names which."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} of more than {MAX_MESSAGE_BYTES >> 20} MiB")


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """A response with status 200 whose body is not read yet.

    sent_s: when the request was sent, on the monotonic clock. wait_notes: a line for each
    Retry-After that was waited for. on_chunk: called for each chunk of the body.
    """

    http: httpx.Response
    sent_s: float
    wait_notes: tuple[str, ...]
    on_chunk: Callable[[], None]

    @property
    def media_type(self) -> str:
        """The media type without parameters, e.g. `text/event-stream`."""
        kind: str = self.http.headers.get("content-type", "")
        return kind.partition(";")[0].strip().lower()

    def iter_bytes(self) -> Iterator[bytes]:
        """Yield the chunks of the body as the network delivers them."""
        for chunk in self.http.iter_bytes():
            self.on_chunk()
            yield chunk

    def read(self) -> bytes:
        """Read the whole body. Raises MessageTooLong, which Connection turns into its error."""
        return join_chunks(self.iter_bytes())


def join_chunks(chunks: Iterable[bytes]) -> bytes:
    """Concatenate the chunks of a body. Raises MessageTooLong."""
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise MessageTooLong("a response")
    return bytes(body)


def _ignore() -> None:
    pass


class Connection(ABC):
    """Sends requests to one server; abort() ends them from another thread.

    notify: called with a line when the user should know something. url: the base URL; empty for the
    local server.

    get() and post() yield an ErrorResponse for every status but 200. They raise
    errors.connection_error() if there is no response, or if reading it inside the block fails; and
    errors.unavailable() if the response is too long.
    """

    def __init__(self, errors: ServerErrors, notify: Callable[[str], None], url: str = "") -> None:
        self.errors = errors
        self.notify = notify
        self.url = url
        self._warning = ""
        self._sockets = AbortableSockets()
        self._http = self._create_http_client()

    @abstractmethod
    def _create_http_client(self) -> httpx.Client:
        """Create a client whose request hook is self._sockets.track_request."""

    @property
    def is_aborted(self) -> bool:
        return self._sockets.is_aborted

    def warn_once(self) -> None:
        """Say what is unsafe about the connection, if anything."""
        if self._warning:
            self.notify(self._warning)
            self._warning = ""

    def abort(self) -> None:
        """End all requests, now and in future, with an error."""
        self._sockets.abort()

    def close(self) -> None:
        self._http.close()

    def reopen(self) -> None:
        """Drop the open connections; the next request opens a new one."""
        self._http.close()
        self._http = self._create_http_client()

    @contextlib.contextmanager
    def get(
        self, path: str, timeout_s: float | None = LIST_TIMEOUT_S
    ) -> Iterator[ServerResponse | ErrorResponse]:
        """Send a GET request. path: relative to the base URL, or a whole URL."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        with self._send(self._http.build_request("GET", path, timeout=timeout)) as reply:
            yield reply

    @contextlib.contextmanager
    def post(self, path: str, body: bytes) -> Iterator[ServerResponse | ErrorResponse]:
        """Send JSON in a POST request; the response may take any time."""
        # a compressed stream might be delivered in large blocks
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        request = self._http.build_request("POST", path, content=body, headers=headers)
        with self._watch() as on_chunk, self._send(request, on_chunk) as reply:
            yield reply

    def _watch(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Watch a request that may take any time. Yields the function to call for each chunk."""
        return contextlib.nullcontext(_ignore)

    @contextlib.contextmanager
    def _send(
        self, request: httpx.Request, on_chunk: Callable[[], None] = _ignore
    ) -> Iterator[ServerResponse | ErrorResponse]:
        waits: list[str] = []
        try:
            while True:
                sent_s = time.monotonic()
                response = self._send_once(request)
                with contextlib.closing(response):
                    if response.status_code == 200:
                        yield ServerResponse(response, sent_s, tuple(waits), on_chunk)
                        return
                    refusal = _error_response(response)
                wait = None if self.is_aborted else self._wait_before_retry(refusal, len(waits))
                if wait is None:
                    yield refusal
                    return
                waits.append(wait)
        except httpx.HTTPError as error:
            raise self.errors.connection_error(error) from error
        except MessageTooLong as error:
            raise self.errors.unavailable(f"{self.errors.name} sent {error}") from error

    def _send_once(self, request: httpx.Request) -> httpx.Response:
        return self._http.send(request, stream=True)

    def _wait_before_retry(self, refusal: ErrorResponse, num_retries: int) -> str | None:
        """Wait if the request should be sent again. Returns a note on the wait, or None."""
        return None


class LocalConnection(Connection):
    """Connections to the local server's Unix socket.

    notify: also called, from another thread, if the server stops answering during a request.
    Requests raise BadSetting if another user could replace the socket.
    """

    errors: LocalErrors

    def __init__(self, settings: ServerSettings, notify: Callable[[str], None]) -> None:
        self._settings = settings
        self._session_id = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        super().__init__(LocalErrors(settings), notify)

    def _send_once(self, request: httpx.Request) -> httpx.Response:
        self._settings.require_safe_runtime_dir()
        deadline = time.monotonic() + _BACKLOG_TIMEOUT_S
        while True:
            try:
                return super()._send_once(request)
            except httpx.ConnectError as error:
                if not is_backlog_full(error) or time.monotonic() > deadline or self.is_aborted:
                    raise
            self._sockets.sleep(_BACKLOG_POLL_S)

    def _watch(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return ServerWatch(self._find_problem, self.notify)

    def health(self) -> Health | None:
        """The server's health, ready or loading; None if none runs or it is shutting down.

        Raises ServerNotAnswering after 5 s.
        """
        try:
            with self.get(_HEALTH_URL, HEALTH_TIMEOUT_S) as reply:
                if isinstance(reply, ServerResponse):
                    status, body = 200, reply.read()
                else:
                    status, body = reply.status, reply.body
        except ServerNotAnswering:
            raise
        except ServerUnavailable:
            return None
        if status not in (200, 503):  # 503: it is not ready
            raise self.errors.refusal(ErrorResponse(status, body))
        health = self.errors.decode(body, Health)
        return None if health.status == "stopping" else health

    def _find_problem(self) -> str | None:
        """Why the server does not answer; None if it does, or if requests end with an error."""
        with contextlib.closing(LocalConnection(self._settings, self.notify)) as asking:
            try:
                asking.health()
            except ServerNotAnswering as error:
                return error.message
            except LocalgenError:
                pass
            return None

    def _create_http_client(self) -> httpx.Client:
        return httpx.Client(
            base_url="http://localgen/v1",
            # no TLS on a Unix socket: reading the certificates would take 20 ms
            transport=httpx.HTTPTransport(
                verify=False, uds=str(self._settings.socket_path), limits=_NO_LIMITS
            ),
            timeout=_TIMEOUT,
            headers={"X-Localgen-Session": self._session_id},
            event_hooks={"request": [self._sockets.track_request]},
            trust_env=False,  # no proxies
        )


class EndpointConnection(Connection):
    """TCP connections to an endpoint. Retries a busy server after its Retry-After.

    notify: also called before each wait. sleep: waits that many seconds, by default until abort().
    restart_wait_s: how long to wait for a server that is_restarted.
    Raises BadSetting if the API key or a proxy setting is invalid.
    """

    errors: EndpointErrors

    def __init__(
        self,
        endpoint: Endpoint,
        notify: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] | None = None,
        restart_wait_s: float = 0.0,
    ) -> None:
        self._endpoint = endpoint
        super().__init__(EndpointErrors(endpoint), notify, endpoint.url)
        self._sleep = sleep or self._sockets.sleep
        self._restart_wait_s = restart_wait_s
        is_safe = endpoint.key_env is None or endpoint.is_loopback or endpoint.is_encrypted
        if not is_safe:
            self._warning = f"the API key is sent to {endpoint.host} unencrypted: use https://"

    def _create_http_client(self) -> httpx.Client:
        endpoint, key = self._endpoint, self._endpoint.api_key()
        headers = {"User-Agent": f"localgen/{localgen.__version__}"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        # never use a proxy for this machine, even if the environment sets one
        mounts = {f"all://{endpoint.url_host}": None} if endpoint.is_loopback else None
        try:
            return httpx.Client(
                base_url=endpoint.url,
                headers=headers,
                mounts=mounts,
                limits=_NO_LIMITS,
                timeout=_TIMEOUT,
                event_hooks={"request": [self._sockets.track_request]},
            )
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise BadSetting(
                f"cannot connect to {endpoint.display_name} with the settings of the environment "
                f"({error}): check HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
            ) from error

    def _send_once(self, request: httpx.Request) -> httpx.Response:
        deadline, was_said = time.monotonic() + self._restart_wait_s, False
        while True:
            try:
                return super()._send_once(request)
            except httpx.ConnectError:
                is_over = time.monotonic() >= deadline or self.is_aborted
                if is_over or not self._endpoint.is_restarted:
                    raise
            if not was_said:
                wait = f"waiting up to {self._restart_wait_s:.0f} s; Ctrl+C stops"
                self.notify(f"{self.errors.name} starts anew: {wait}")
                was_said = True
            self._sleep(_RESTART_POLL_S)

    def _wait_before_retry(self, refusal: ErrorResponse, num_retries: int) -> str | None:
        wait_s = refusal.retry_after_s
        if refusal.status not in (429, 503) or num_retries == MAX_RETRIES:
            return None
        if wait_s is None or wait_s > MAX_RETRY_AFTER_S:
            return None
        reason = f"{self.errors.name} asks to wait {wait_s:,.0f} s ({refusal.status})"
        self.notify(f"{reason}; Ctrl+C stops")
        self._sleep(wait_s)
        return f"{reason}, so the request was sent again"


def _error_response(response: httpx.Response) -> ErrorResponse:
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return ErrorResponse(
        response.status_code,
        body[:_MAX_ERROR_BYTES],
        is_html="html" in response.headers.get("content-type", ""),
        location=response.headers.get("location", ""),
        retry_after_s=parse_retry_after(response.headers.get("retry-after", ""), time.time()),
        request_id=response.headers.get("x-request-id", ""),
    )


def parse_retry_after(retry_after: str, now_s: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None if invalid. now_s: Unix time."""
    with contextlib.suppress(ValueError, OverflowError):
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now_s)
    return None
