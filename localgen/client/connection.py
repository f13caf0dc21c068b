"""Requests to one server: opened, waited for where it asks to wait, or refused."""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

import localgen
from localgen.client.endpoints import Endpoint
from localgen.client.errors import (
    CONNECT_TIMEOUT_S,
    LIST_TIMEOUT_S,
    EndpointErrorResponse,
    connection_error,
)
from localgen.client.sockets import AbortableSockets
from localgen.config import BadSetting

# a server that asks to wait longer than this means: come back another time
MAX_RETRY_AFTER_S = 60.0
MAX_RETRIES = 3
_MAX_ERROR_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EndpointResponse:
    """A response with status 200, its body still to be read. sent_s: on the monotonic clock.

    wait_notes: a line for each time that the server asked to wait before.
    """

    response: httpx.Response
    sent_s: float
    wait_notes: tuple[str, ...]

    @property
    def media_type(self) -> str:
        """Its media type, as `text/event-stream`."""
        kind: str = self.response.headers.get("content-type", "")
        return kind.partition(";")[0].strip().lower()


class EndpointConnection:
    """One server. notify: gets a line when it asks to wait.

    sleep: waits that many seconds; None: or until abort().
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str | None,
        notify: Callable[[str], None],
        sleep: Callable[[float], None] | None,
    ) -> None:
        self._endpoint = endpoint
        self._notify = notify
        self._sockets = AbortableSockets()
        self._sleep = sleep or self._sockets.sleep
        self._http = _create_http_client(endpoint, key, self._sockets)

    def abort(self) -> None:
        """From another thread: end what runs."""
        self._sockets.abort()

    def close(self) -> None:
        self._http.close()

    @contextlib.contextmanager
    def get(self, path: str) -> Iterator[EndpointResponse | EndpointErrorResponse]:
        """What is behind a path. EndpointUnavailable: no answer, or not soon enough."""
        # a list is quick, whatever the model is doing
        timeout = httpx.Timeout(LIST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with self._send(self._http.build_request("GET", path, timeout=timeout)) as reply:
            yield reply

    @contextlib.contextmanager
    def post(self, path: str, body: bytes) -> Iterator[EndpointResponse | EndpointErrorResponse]:
        """The answer to a body of JSON, however long it takes. EndpointUnavailable: none."""
        # compressed, a stream could come in lumps
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        asked = self._http.build_request("POST", path, content=body, headers=headers)
        with self._send(asked) as reply:
            yield reply

    @contextlib.contextmanager
    def _send(self, request: httpx.Request) -> Iterator[EndpointResponse | EndpointErrorResponse]:
        waits: list[str] = []
        try:
            while True:
                sent_s = time.monotonic()
                response = self._http.send(request, stream=True)
                with contextlib.closing(response):
                    if response.status_code == 200:
                        yield EndpointResponse(response, sent_s, tuple(waits))
                        return
                    refusal = _error_response(response)
                is_over = self._sockets.is_aborted or len(waits) == MAX_RETRIES
                if is_over or not _should_retry(refusal):
                    yield refusal
                    return
                waits.append(self._wait_before_retry(refusal))
        except httpx.HTTPError as error:
            raise connection_error(error, self._endpoint) from error

    def _wait_before_retry(self, error: EndpointErrorResponse) -> str:
        """Wait as long as the server asks for; what to tell of it afterwards."""
        assert error.retry_after_s is not None
        why = (
            f"{self._endpoint.display_name} asks to wait {error.retry_after_s:,.0f} s "
            f"({error.status})"
        )
        self._notify(f"{why}; Ctrl+C stops")
        self._sleep(error.retry_after_s)
        return f"{why}, so it was asked again"


def _create_http_client(
    endpoint: Endpoint, key: str | None, sockets: AbortableSockets
) -> httpx.Client:
    headers = {"User-Agent": f"localgen/{localgen.__version__}"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    # no proxy leads to this machine, whatever the environment says of others
    mounts = {f"all://{endpoint.url_host}": None} if endpoint.is_loopback else None
    try:
        return httpx.Client(
            base_url=endpoint.url,
            headers=headers,
            mounts=mounts,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            event_hooks={"request": [sockets.track_request]},
        )
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        # a proxy or a file of certificates that the environment names
        raise BadSetting(
            f"cannot connect to {endpoint.display_name} as the environment says ({error}): "
            "see HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        ) from error


def _error_response(response: httpx.Response) -> EndpointErrorResponse:
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return EndpointErrorResponse(
        response.status_code,
        body[:_MAX_ERROR_BYTES],
        is_html="html" in response.headers.get("content-type", ""),
        location=response.headers.get("location", ""),
        retry_after_s=parse_retry_after(response.headers.get("retry-after", ""), time.time()),
    )


def parse_retry_after(retry_after: str, now_s: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None: it says nothing. now_s: Unix."""
    with contextlib.suppress(ValueError, OverflowError):
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now_s)
    return None


def _should_retry(error: EndpointErrorResponse) -> bool:
    is_busy = error.status in (429, 503)
    return is_busy and error.retry_after_s is not None and error.retry_after_s <= MAX_RETRY_AFTER_S
