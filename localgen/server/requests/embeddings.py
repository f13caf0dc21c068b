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
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.protocol import encode_json
from localgen.server.requests.streaming import cancel_on_disconnect
from localgen.server.stats.request_log import EMBEDDED_REASON, RequestLog, RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """What was asked. account: who pays for its tokens. timeout_s: how long it may take in all.

    dimensions: elements of a vector; None: as many as the model has. options, keep_alive,
    allow_paths: as ModelManager.acquire has them.
    """

    model: str | None
    account: str
    timeout_s: float | None
    request: EmbedRequest
    dimensions: int | None = None
    options: LoadOptions = LoadOptions()
    keep_alive: KeepAlive | None = None
    allow_paths: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingVectors:
    """Vectors of texts, in their order. model: as the server calls it.

    dimensions: how many elements of each were asked for, at most `embedded.width`.
    """

    model: str
    output: Embedded
    dimensions: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.output.prompt_tokens)

    def to_array(self) -> NDArray[np.float32]:
        """float32 little-endian [texts, dimensions], each of length 1."""
        import numpy as np  # what serves chats alone does without it

        width = self.output.width
        whole = np.frombuffer(self.output.vectors, "<f4").reshape(-1, width)
        if self.dimensions == width:
            return whole
        cut = whole[:, : self.dimensions].astype(np.float64)
        lengths = np.linalg.norm(cut, axis=-1, keepdims=True)
        return (cut / np.where(lengths == 0, 1, lengths)).astype("<f4")


async def compute_embeddings(
    manager: ModelManager, journal: RequestLog, job: EmbeddingJob
) -> EmbeddingVectors:
    """Vectors of texts, whatever protocol asks for them; cancelled with the task that waits.

    Raises what manager.acquire does, and what the engine reports: InvalidRequest,
    ContextExceeded, …
    """
    request = job.request
    entry = RequestRecord(
        id=request.id,
        requested_model=job.model or "",
        client=request.client,
        account=job.account,
        arrived_s=request.arrived_s,
    )
    try:
        acquired = manager.acquire(
            job.model, job.options, keep_alive=job.keep_alive, allow_paths=job.allow_paths
        )
        async with acquired as (resident, info):
            entry.model = resident.file.name
            dimensions = _resolve_dimensions(job, info)
            done = await _embed_with_timeout(resident.engine, job)
            entry.outcome, entry.total = EMBEDDED_REASON, _to_finished(done, info.ctx)
            return EmbeddingVectors(entry.model, done, dimensions)
    except LocalgenError as error:
        entry.outcome = error.code
        raise
    finally:
        journal.close(entry)


def _resolve_dimensions(job: EmbeddingJob, info: ModelInfo) -> int:
    """Elements of a vector. InvalidRequest: the model has fewer."""
    width = info.embedding_width
    if job.dimensions is not None and job.dimensions > width:
        raise InvalidRequest(
            f"dimensions is {job.dimensions:,}, vectors of {info.name} have {width:,}: "
            "ask for at most that, or leave it out",
            param="dimensions",
        )
    return job.dimensions or width


async def _embed_with_timeout(engine: EngineClient, job: EmbeddingJob) -> Embedded:
    limit_s, waited_s = job.timeout_s, time.monotonic() - job.request.arrived_s
    try:
        async with asyncio.timeout(None if limit_s is None else limit_s - waited_s):
            return await engine.embed(job.request)
    except TimeoutError:
        raise TimedOut(
            f"the request took longer than the {limit_s:g} s that it may take here"
        ) from None


def _to_finished(output: Embedded, ctx: int) -> Finished:
    """As the journal has ends."""
    return Finished(
        request_id=output.request_id,
        reason=EMBEDDED_REASON,
        timings=output.timings,
        prompt_tokens=sum(output.prompt_tokens),
        completion_tokens=0,
        ctx=ctx,
    )


class EmbeddingResponse(Response):
    """Answers a job. What goes wrong is raised, as an HTTP status. build_body: how it is
    printed."""

    def __init__(
        self,
        manager: ModelManager,
        journal: RequestLog,
        job: EmbeddingJob,
        build_body: Callable[[EmbeddingVectors], dict[str, Any]],
    ) -> None:
        super().__init__()
        self._manager, self._journal, self._job = manager, journal, job
        self._build_body = build_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            vectors = await compute_embeddings(self._manager, self._journal, self._job)
            # in a thread: it may be millions of numbers
            response = await asyncio.to_thread(self._render, vectors)
            await response(scope, receive, send)

    def _render(self, vectors: EmbeddingVectors) -> Response:
        headers = {"X-Request-Id": self._job.request.id}
        return Response(encode_json(self._build_body(vectors)), 200, headers, "application/json")
