"""Looking at a server again and again: our own over its socket, or any at a URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.client.client import Client
from localgen.client.connection import EndpointConnection, EndpointResponse
from localgen.client.endpoints import Endpoint
from localgen.client.errors import endpoint_error, not_openai_error
from localgen.client.prometheus import MetricsParser
from localgen.client.snapshot import ServerSnapshot, parse_localgen_stats
from localgen.config import ServerSettings

# of our own figures, and of pages that may be long
STATS_INTERVAL_S, METRICS_INTERVAL_S = 0.25, 1.0
_UNSUPPORTED_STATUSES = (404, 405, 501)
_METRICS_HELP = "llama-server has it with --metrics, SGLang with --enable-metrics, vLLM always"


class LocalServerMonitor:
    """Looks at the server of this user; starts none and loads nothing."""

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self._client = Client(settings)

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """As the server sends them. ServerUnavailable: none runs, or it is gone."""
        for told in self._client.stream_stats():
            yield parse_localgen_stats(told)

    def cancel(self, request_id: str) -> bool:
        """End a request; False: it has ended."""
        return self._client.cancel(request_id)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RemoteServerMonitor:
    """Looks at a server at a URL: by /v1/stats where it is a localgen, else by its /metrics.

    sleep: waits that many seconds.
    """

    def __init__(self, endpoint: Endpoint, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._endpoint = endpoint
        self._sleep = sleep
        self._connection = EndpointConnection(
            endpoint, endpoint.api_key(), lambda line: None, sleep
        )

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """Now and then, for ever. LocalgenError: it does not answer, or says nothing of use."""
        stats = self._fetch_stats()
        if stats is None:
            yield from self._metrics_snapshots()
            return
        while stats is not None:
            yield parse_localgen_stats(stats)
            self._sleep(STATS_INTERVAL_S)
            stats = self._fetch_stats()

    def cancel(self, request_id: str) -> bool:
        """End a request of a localgen server. InvalidRequest: this one has no such thing."""
        with self._connection.post(f"requests/{quote(request_id, safe='')}/cancel", b"{}") as reply:
            if isinstance(reply, EndpointResponse):
                told = _decode_object(reply.response.read())
                return bool(told and told.get("cancelled"))
        if reply.status in _UNSUPPORTED_STATUSES:
            raise InvalidRequest(f"{self._endpoint.display_name} cannot cancel a request of others")
        raise endpoint_error(reply, self._endpoint)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _fetch_stats(self) -> dict[str, Any] | None:
        """What a localgen server says; None: it is none."""
        with self._connection.get("stats") as reply:
            if isinstance(reply, EndpointResponse):
                told = _decode_object(reply.response.read())
                return told if told is not None and {"server", "models"} <= told.keys() else None
        if reply.status in (401, 403) or reply.status >= 500:
            raise endpoint_error(reply, self._endpoint)
        return None

    def _metrics_snapshots(self) -> Iterator[ServerSnapshot]:
        reader = MetricsParser()
        url = self._endpoint.url.removesuffix("/v1") + "/metrics"
        while True:
            with self._connection.get(url) as reply:
                if not isinstance(reply, EndpointResponse):
                    raise self._no_metrics_error(reply.status) or endpoint_error(
                        reply, self._endpoint
                    )
                if reply.media_type == "text/html":
                    raise not_openai_error(self._endpoint, reply.media_type)
                text = reply.response.read().decode(errors="replace")
            yield reader.parse(text, time.monotonic())
            self._sleep(METRICS_INTERVAL_S)

    def _no_metrics_error(self, status: int) -> LocalgenError | None:
        if status not in _UNSUPPORTED_STATUSES:
            return None
        return InvalidRequest(f"{self._endpoint.display_name} has no /metrics: {_METRICS_HELP}")


def _decode_object(body: bytes) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return told if isinstance(told, dict) else None
