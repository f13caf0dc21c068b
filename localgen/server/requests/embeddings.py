"""Embedding requests, independent of the API protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import InvalidRequest, LocalgenError, TimedOut
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.types import Embedded, EmbedRequest, Finished
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.manager import ModelManager
from localgen.server.models.names import answered_name
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.presets import NamedSettings
from localgen.server.requests.protocol import encode_json
from localgen.server.requests.streaming import cancel_on_disconnect
from localgen.server.stats.request_log import EMBEDDED_REASON, RequestLog, RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingJob:
    """An embedding request with its model.

    account: charged for its tokens. timeout_s: maximum duration since arrival. dimensions: elements
    per embedding, or None for all of the model's. options, keep_alive, allow_paths: see
    ModelManager.acquire.
    """

    model: str | None
    account: str
    timeout_s: float | None
    request: EmbedRequest
    dimensions: int | None = None
    options: LoadOptions = LoadOptions()
    keep_alive: KeepAlive | None = None
    allow_paths: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When the request times out (monotonic seconds), or None if never."""
        return None if self.timeout_s is None else self.request.arrived_s + self.timeout_s


@dataclass(frozen=True, slots=True)
class EmbeddingVectors:
    """Embeddings in input order. model: its name in the answer.

    dimensions: requested elements per embedding, at most `output.width`. load_ms: time until the
    model was loaded; total_ms: since the request arrived.
    """

    model: str
    output: Embedded
    dimensions: int
    load_ms: float
    total_ms: float

    @property
    def num_tokens(self) -> int:
        """Total tokens of all inputs."""
        return sum(self.output.prompt_tokens)

    def scores(self) -> list[float]:
        """The scores of a request with a query, in input order."""
        import numpy as np  # lazy, as below

        assert self.output.width == 1
        scores: list[float] = np.frombuffer(self.output.vectors, "<f4").tolist()
        return scores

    def to_array(self) -> NDArray[np.float32]:
        """Return float32 little-endian [inputs, dimensions], rows normalized to unit length."""
        import numpy as np  # lazy: servers without embeddings do not need it

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
    """Load the model if needed and compute embeddings. Cancellation reaches the engine.

    Raises the errors of manager.acquire and of the engine: InvalidRequest, ContextExceeded, …
    """
    request, asked_s = job.request, time.monotonic()
    entry = RequestRecord(
        id=request.id,
        requested_model=job.model or "",
        client=request.client,
        account=job.account,
        arrived_s=request.arrived_s,
    )
    try:
        name = manager.default_name if job.model is None else job.model
        (await NamedSettings.find(name)).require_no_adapter()
        acquired = manager.acquire(
            job.model,
            job.options,
            keep_alive=job.keep_alive,
            allow_paths=job.allow_paths,
            deadline_s=job.deadline_s,
        )
        async with acquired as (resident, info):
            entry.model = resident.file.name
            entry.answered_model = answered_name(job.model, resident.file)
            load_ms = (time.monotonic() - asked_s) * 1e3
            dimensions = _resolve_dimensions(job, info)
            done = await _embed_with_timeout(resident.engine, job)
            entry.outcome, entry.total = EMBEDDED_REASON, _to_finished(done, info.ctx)
            total_ms = (time.monotonic() - request.arrived_s) * 1e3
            return EmbeddingVectors(entry.answered_model, done, dimensions, load_ms, total_ms)
    except LocalgenError as error:
        entry.outcome = error.code
        raise
    except Exception:
        entry.outcome = LocalgenError.code
        raise
    finally:
        journal.close(entry)


def _resolve_dimensions(job: EmbeddingJob, info: ModelInfo) -> int:
    """Return the elements per embedding. Raises InvalidRequest if the model has fewer."""
    width = info.embedding_width
    if job.dimensions is not None and job.dimensions > width:
        raise InvalidRequest(
            f"dimensions is {job.dimensions:,}, embeddings of {info.name} have {width:,}: "
            "request at most that, or leave it out",
            param="dimensions",
        )
    return job.dimensions or width


async def _embed_with_timeout(engine: EngineClient, job: EmbeddingJob) -> Embedded:
    left_s = None if job.deadline_s is None else job.deadline_s - time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            return await engine.embed(job.request)
    except TimeoutError:
        raise TimedOut(f"the request timed out, the limit is {job.timeout_s:g} s") from None


def _to_finished(output: Embedded, ctx: int) -> Finished:
    """Convert for the request log."""
    return Finished(
        request_id=output.request_id,
        reason=EMBEDDED_REASON,
        timings=output.timings,
        prompt_tokens=sum(output.prompt_tokens),
        completion_tokens=0,
        ctx=ctx,
    )


class EmbeddingResponse(Response):
    """Runs an embedding job and sends the result. Errors are raised before the response starts.

    build_body: builds the JSON body of the protocol.
    """

    def __init__(
        self,
        manager: ModelManager,
        journal: RequestLog,
        job: EmbeddingJob,
        build_body: Callable[[EmbeddingVectors], object],
    ) -> None:
        super().__init__()
        self._manager, self._journal, self._job = manager, journal, job
        self._build_body = build_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            vectors = await compute_embeddings(self._manager, self._journal, self._job)
            # in a thread: there may be millions of numbers
            response = await asyncio.to_thread(self._render, vectors)
            await response(scope, receive, send)

    def _render(self, vectors: EmbeddingVectors) -> Response:
        return Response(encode_json(self._build_body(vectors)), media_type="application/json")
