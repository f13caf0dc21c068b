"""Vectors of texts: one request to an engine, whichever protocol wants them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import InvalidRequest, LocalgenError, TimedOut
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.types import Embedded, EmbedRequest, Finished
from localgen.server.models.engine_client import Engine
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.protocol import encode
from localgen.server.requests.streaming import cancelled_on_disconnect
from localgen.server.stats.request_log import EMBEDDED, Entry, Journal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """What was asked. account: who pays for its tokens. timeout_s: how long it may take in all.

    dimensions: elements of a vector; None: as many as the model has. options, keep_alive, paths:
    as ModelManager.using has them.
    """

    model: str | None
    account: str
    timeout_s: float | None
    request: EmbedRequest
    dimensions: int | None = None
    options: LoadOptions = LoadOptions()
    keep_alive: KeepAlive | None = None
    paths: bool = False


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of texts, in their order. model: as the server calls it.

    dimensions: how many elements of each were asked for, at most `embedded.width`.
    """

    model: str
    embedded: Embedded
    dimensions: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.embedded.prompt_tokens)

    def rows(self) -> NDArray[np.float32]:
        """float32 little-endian [texts, dimensions], each of length 1."""
        import numpy as np  # what serves chats alone does without it

        width = self.embedded.width
        whole = np.frombuffer(self.embedded.vectors, "<f4").reshape(-1, width)
        if self.dimensions == width:
            return whole
        cut = whole[:, : self.dimensions].astype(np.float64)
        lengths = np.linalg.norm(cut, axis=-1, keepdims=True)
        return (cut / np.where(lengths == 0, 1, lengths)).astype("<f4")


async def embed(manager: ModelManager, journal: Journal, job: EmbedJob) -> Vectors:
    """Vectors of texts, whatever protocol asks for them; cancelled with the task that waits.

    Raises what manager.using does, and what the engine reports: InvalidRequest, ContextExceeded, …
    """
    request = job.request
    entry = Entry(
        id=request.id,
        asked=job.model or "",
        client=request.client,
        account=job.account,
        arrived_s=request.arrived_s,
    )
    try:
        using = manager.using(job.model, job.options, keep_alive=job.keep_alive, paths=job.paths)
        async with using as (resident, info):
            entry.model = resident.file.name
            dimensions = _dimensions(job, info)
            done = await _in_time(resident.engine, job)
            entry.outcome, entry.end = EMBEDDED, _end(done, info.ctx)
            return Vectors(entry.model, done, dimensions)
    except LocalgenError as error:
        entry.outcome = error.code
        raise
    finally:
        journal.close(entry)


def _dimensions(job: EmbedJob, info: ModelInfo) -> int:
    """Elements of a vector. InvalidRequest: the model has fewer."""
    width = info.embedding_width
    if job.dimensions is not None and job.dimensions > width:
        raise InvalidRequest(
            f"dimensions is {job.dimensions:,}, vectors of {info.name} have {width:,}: "
            "ask for at most that, or leave it out",
            param="dimensions",
        )
    return job.dimensions or width


async def _in_time(engine: Engine, job: EmbedJob) -> Embedded:
    limit_s, waited_s = job.timeout_s, time.monotonic() - job.request.arrived_s
    try:
        async with asyncio.timeout(None if limit_s is None else limit_s - waited_s):
            return await engine.embed(job.request)
    except TimeoutError:
        raise TimedOut(
            f"the request took longer than the {limit_s:g} s that it may take here"
        ) from None


def _end(done: Embedded, ctx: int) -> Finished:
    """As the journal has ends."""
    return Finished(
        request_id=done.request_id,
        reason=EMBEDDED,
        timings=done.timings,
        prompt_tokens=sum(done.prompt_tokens),
        completion_tokens=0,
        ctx=ctx,
    )


class VectorsResponse(Response):
    """Answers a job. What goes wrong is raised, as an HTTP status. body_of: how it is printed."""

    def __init__(
        self,
        manager: ModelManager,
        journal: Journal,
        job: EmbedJob,
        body_of: Callable[[Vectors], dict[str, Any]],
    ) -> None:
        super().__init__()
        self._manager, self._journal, self._job = manager, journal, job
        self._body_of = body_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_on_disconnect(receive):
            vectors = await embed(self._manager, self._journal, self._job)
            # in a thread: it may be millions of numbers
            response = await asyncio.to_thread(self._rendered, vectors)
            await response(scope, receive, send)

    def _rendered(self, vectors: Vectors) -> Response:
        headers = {"X-Request-Id": self._job.request.id}
        return Response(encode(self._body_of(vectors)), 200, headers, "application/json")
