"""Poll a server's state: the local one over its socket, or any at a URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import quote

from localgen.backends.errors import InvalidRequest
from localgen.client.connection import EndpointConnection, ServerResponse
from localgen.client.endpoints import Endpoint
from localgen.client.local_client import LocalClient
from localgen.client.prometheus import MetricsParser
from localgen.client.remote_stats import fetch_stats, try_decode_object
from localgen.client.snapshot import ServerSnapshot, parse_localgen_stats
from localgen.config import ServerSettings

# /metrics pages can be long
STATS_INTERVAL_S, METRICS_INTERVAL_S = 0.25, 1.0
_UNSUPPORTED_STATUSES = (404, 405, 501)
_METRICS_HELP = "llama-server needs --metrics for it, SGLang --enable-metrics; vLLM always has it"


class LocalServerMonitor:
    """Monitors the local server. Does not start it and loads nothing."""

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self._client = LocalClient(settings)

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """Yield snapshots as the server sends them.

        Raises ServerUnavailable if no server runs, or if it ends.
        """
        for stats in self._client.stream_stats():
            yield parse_localgen_stats(stats)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False if it has ended."""
        return self._client.cancel(request_id)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RemoteServerMonitor:
    """Monitors a server at a URL: by the /v1/stats of localgen, else by its /metrics.

    sleep: waits that many seconds.
    """

    def __init__(self, endpoint: Endpoint, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._endpoint = endpoint
        self._sleep = sleep
        self._connection = EndpointConnection(endpoint, sleep=sleep)

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """Yield snapshots at regular intervals.

        Raises LocalgenError if the server does not respond, or has no statistics.
        """
        stats = fetch_stats(self._connection)
        if stats is None:
            yield from self._metrics_snapshots()
            return
        while stats is not None:
            yield parse_localgen_stats(stats)
            self._sleep(STATS_INTERVAL_S)
            stats = fetch_stats(self._connection)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request of a localgen server. Raises InvalidRequest for other servers."""
        with self._connection.post(f"requests/{quote(request_id, safe='')}/cancel", b"{}") as reply:
            if isinstance(reply, ServerResponse):
                result = try_decode_object(reply.read())
                return bool(result and result.get("cancelled"))
        if reply.status in _UNSUPPORTED_STATUSES:
            raise InvalidRequest(
                f"{self._endpoint.display_name} cannot cancel requests of other clients"
            )
        raise self._connection.errors.refusal(reply)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _metrics_snapshots(self) -> Iterator[ServerSnapshot]:
        parser, sole_name = MetricsParser(), ""
        url = self._endpoint.url.removesuffix("/v1") + "/metrics"
        while True:
            snapshot = parser.parse(self._fetch_metrics(url), time.monotonic())
            if [model.name for model in snapshot.models] == [snapshot.server_type]:  # unlabelled
                sole_name = sole_name or self._fetch_sole_name() or snapshot.server_type
                named = tuple(replace(model, name=sole_name) for model in snapshot.models)
                snapshot = replace(snapshot, models=named)
            yield snapshot
            self._sleep(METRICS_INTERVAL_S)

    def _fetch_sole_name(self) -> str:
        """The name of the only model that the server lists, or empty."""
        with self._connection.get("models") as reply:
            listed = try_decode_object(reply.read()) if isinstance(reply, ServerResponse) else None
        match listed:
            case {"data": [{"id": str(name)}]}:
                return name
        return ""

    def _fetch_metrics(self, url: str) -> str:
        with self._connection.get(url) as reply:
            if isinstance(reply, ServerResponse):
                if reply.media_type == "text/html":
                    raise self._connection.errors.not_openai(reply.media_type)
                return reply.read().decode(errors="replace")
        if reply.status in _UNSUPPORTED_STATUSES:
            raise InvalidRequest(f"{self._endpoint.display_name} has no /metrics: {_METRICS_HELP}")
        raise self._connection.errors.refusal(reply)
