"""The end of a gateway: new requests are refused, and running ones have time to be answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.responses import Response

from localgen.backends.errors import ServerUnavailable
from localgen.server.http.guard import RequestRefused, is_rate_limited
from localgen.server.requests.protocol import encode_json

STOPPING = "the cluster is stopping: try again when it runs"
# a cluster that is started anew takes longer
_RETRY_AFTER = {"Retry-After": "5"}
# for the last events to reach their clients
_FLUSH_TIMEOUT_S = 2.0


class Drain:
    """The requests of a gateway that are being answered, and whether it takes new ones."""

    def __init__(self) -> None:
        self._answering = set[asyncio.Task[None]]()
        self._has_begun = self._is_over = False

    def begin(self) -> int:
        """Refuse new requests from now on. Returns the number of running ones."""
        self._has_begun = True
        return len(self._answering)

    def add(self, answering: asyncio.Task[None]) -> None:
        """Count a request until its task has ended."""
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    def refusal(self, method: str, path: str) -> Response | None:
        """The response to a new request, or None if it is taken, as those that compute nothing."""
        if not self._has_begun or not is_rate_limited(method, path):
            return None
        refused = RequestRefused(503, ServerUnavailable.code, STOPPING, _RETRY_AFTER)
        return refused.to_response(path)

    def health(self) -> Response:
        """The answer to /health."""
        status = {"status": "stopping" if self._has_begun else "ok"}
        code, headers = (503, _RETRY_AFTER) if self._has_begun else (200, None)
        return Response(encode_json(status), code, headers, "application/json")

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Around the work for a request: raises ServerUnavailable in it when end() is called."""
        try:
            yield
        except asyncio.CancelledError as error:
            if not self._is_over:  # the client has left
                raise
            raise ServerUnavailable(STOPPING) from error

    async def end(self) -> None:
        """End the running requests with an error, and wait until it is sent."""
        self._has_begun = self._is_over = True
        answering = set(self._answering)
        for task in answering:
            task.cancel()
        if answering:
            await asyncio.wait(answering, timeout=_FLUSH_TIMEOUT_S)
