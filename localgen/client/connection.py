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
from localgen.client.errors import CONNECT_S, LIST_S, Refusal, lost
from localgen.client.sockets import Sockets
from localgen.config import BadSetting

# a server that asks to wait longer than this means: come back another time
LONGEST_WAIT_S = 60.0
MOST_WAITS = 3
_REFUSAL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Reply:
    """A response with status 200, its body still to be read. sent_s: on the monotonic clock.

    waits: a line for each time that the server asked to wait before.
    """

    response: httpx.Response
    sent_s: float
    waits: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Its media type, as `text/event-stream`."""
        kind: str = self.response.headers.get("content-type", "")
        return kind.partition(";")[0].strip().lower()


class Connection:
    """One server. say: gets a line when it asks to wait.

    sleep: waits that many seconds; None: or until cut().
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str | None,
        say: Callable[[str], None],
        sleep: Callable[[float], None] | None,
    ) -> None:
        self._endpoint = endpoint
        self._say = say
        self._sockets = Sockets()
        self._sleep = sleep or self._sockets.sleep
        self._http = _http(endpoint, key, self._sockets)

    def cut(self) -> None:
        """From another thread: end what runs."""
        self._sockets.cut()

    def close(self) -> None:
        self._http.close()

    @contextlib.contextmanager
    def get(self, path: str) -> Iterator[Reply | Refusal]:
        """What is behind a path. EndpointUnavailable: no answer, or not soon enough."""
        # a list is quick, whatever the model is doing
        timeout = httpx.Timeout(LIST_S, connect=CONNECT_S)
        with self._opened(self._http.build_request("GET", path, timeout=timeout)) as reply:
            yield reply

    @contextlib.contextmanager
    def post(self, path: str, body: bytes) -> Iterator[Reply | Refusal]:
        """The answer to a body of JSON, however long it takes. EndpointUnavailable: none."""
        # compressed, a stream could come in lumps
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        asked = self._http.build_request("POST", path, content=body, headers=headers)
        with self._opened(asked) as reply:
            yield reply

    @contextlib.contextmanager
    def _opened(self, request: httpx.Request) -> Iterator[Reply | Refusal]:
        waits: list[str] = []
        try:
            while True:
                sent_s = time.monotonic()
                response = self._http.send(request, stream=True)
                with contextlib.closing(response):
                    if response.status_code == 200:
                        yield Reply(response, sent_s, tuple(waits))
                        return
                    refusal = _refusal(response)
                is_over = self._sockets.is_cut or len(waits) == MOST_WAITS
                if is_over or not _is_worth_waiting(refusal):
                    yield refusal
                    return
                waits.append(self._wait(refusal))
        except httpx.HTTPError as error:
            raise lost(error, self._endpoint) from error

    def _wait(self, refusal: Refusal) -> str:
        """Wait as long as the server asks for; what to tell of it afterwards."""
        assert refusal.wait_s is not None
        why = f"{self._endpoint.where} asks to wait {refusal.wait_s:,.0f} s ({refusal.status})"
        self._say(f"{why}; Ctrl+C stops")
        self._sleep(refusal.wait_s)
        return f"{why}, so it was asked again"


def _http(endpoint: Endpoint, key: str | None, sockets: Sockets) -> httpx.Client:
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
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            event_hooks={"request": [sockets.watch]},
        )
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        # a proxy or a file of certificates that the environment names
        raise BadSetting(
            f"cannot connect to {endpoint.where} as the environment says ({error}): "
            "see HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
        ) from error


def _refusal(response: httpx.Response) -> Refusal:
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) >= _REFUSAL_BYTES:
            break
    return Refusal(
        response.status_code,
        body[:_REFUSAL_BYTES],
        is_page="html" in response.headers.get("content-type", ""),
        location=response.headers.get("location", ""),
        wait_s=wait_s(response.headers.get("retry-after", ""), time.time()),
    )


def wait_s(retry_after: str, now_s: float) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None: it says nothing. now_s: Unix."""
    with contextlib.suppress(ValueError, OverflowError):
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now_s)
    return None


def _is_worth_waiting(refusal: Refusal) -> bool:
    is_busy = refusal.status in (429, 503)
    return is_busy and refusal.wait_s is not None and refusal.wait_s <= LONGEST_WAIT_S
