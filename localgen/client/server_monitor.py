"""Looking at a server again and again: our own over its socket, or any at a URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.client.client import Client
from localgen.client.connection import Connection, Reply
from localgen.client.endpoints import Endpoint
from localgen.client.errors import failure, not_openai
from localgen.client.prometheus import MetricsReader
from localgen.client.snapshot import Snapshot, snapshot_of
from localgen.config import Settings

# of our own figures, and of pages that may be long
STATS_PERIOD_S, METRICS_PERIOD_S = 0.25, 1.0
_NOT_THERE = (404, 405, 501)
_HOW = "llama-server has it with --metrics, SGLang with --enable-metrics, vLLM always"


class OwnWatch:
    """Looks at the server of this user; starts none and loads nothing."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._client = Client(settings)

    def snapshots(self) -> Iterator[Snapshot]:
        """As the server sends them. ServerUnavailable: none runs, or it is gone."""
        for told in self._client.stats_stream():
            yield snapshot_of(told)

    def cancel(self, request_id: str) -> bool:
        """End a request; False: it has ended."""
        return self._client.cancel(request_id)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class RemoteWatch:
    """Looks at a server at a URL: by /v1/stats where it is a localgen, else by its /metrics.

    sleep: waits that many seconds.
    """

    def __init__(self, endpoint: Endpoint, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._endpoint = endpoint
        self._sleep = sleep
        self._connection = Connection(endpoint, endpoint.key(), lambda line: None, sleep)

    def snapshots(self) -> Iterator[Snapshot]:
        """Now and then, for ever. LocalgenError: it does not answer, or says nothing of use."""
        stats = self._stats()
        if stats is None:
            yield from self._metrics()
            return
        while stats is not None:
            yield snapshot_of(stats)
            self._sleep(STATS_PERIOD_S)
            stats = self._stats()

    def cancel(self, request_id: str) -> bool:
        """End a request of a localgen server. InvalidRequest: this one has no such thing."""
        with self._connection.post(f"requests/{quote(request_id, safe='')}/cancel", b"{}") as reply:
            if isinstance(reply, Reply):
                told = _json(reply.response.read())
                return bool(told and told.get("cancelled"))
        if reply.status in _NOT_THERE:
            raise InvalidRequest(f"{self._endpoint.where} cannot cancel a request of others")
        raise failure(reply, self._endpoint)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _stats(self) -> dict[str, Any] | None:
        """What a localgen server says; None: it is none."""
        with self._connection.get("stats") as reply:
            if isinstance(reply, Reply):
                told = _json(reply.response.read())
                return told if told is not None and {"server", "models"} <= told.keys() else None
        if reply.status in (401, 403) or reply.status >= 500:
            raise failure(reply, self._endpoint)
        return None

    def _metrics(self) -> Iterator[Snapshot]:
        reader = MetricsReader()
        url = self._endpoint.url.removesuffix("/v1") + "/metrics"
        while True:
            with self._connection.get(url) as reply:
                if not isinstance(reply, Reply):
                    raise self._no_figures(reply.status) or failure(reply, self._endpoint)
                if reply.kind == "text/html":
                    raise not_openai(self._endpoint, reply.kind)
                text = reply.response.read().decode(errors="replace")
            yield reader.read(text, time.monotonic())
            self._sleep(METRICS_PERIOD_S)

    def _no_figures(self, status: int) -> LocalgenError | None:
        if status not in _NOT_THERE:
            return None
        return InvalidRequest(f"{self._endpoint.where} has no /metrics: {_HOW}")


def _json(body: bytes) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return told if isinstance(told, dict) else None
