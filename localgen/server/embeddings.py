"""Vectors of texts: one request to an engine, and the answer as OpenAI's servers print it."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import InvalidRequest, LocalgenError, TimedOut
from localgen.backends.types import Embedded, EmbedRequest, Finished
from localgen.server import openai
from localgen.server.engines import Engine
from localgen.server.generation import cancelled_on_disconnect
from localgen.server.journal import EMBEDDED, Entry, Journal
from localgen.server.manager import ModelManager

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """What was asked. account: who pays for its tokens. timeout_s: how long it may take in all."""

    model: str | None
    account: str
    timeout_s: float | None
    request: EmbedRequest


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of texts, in their order. model: as the server calls it."""

    model: str
    embedded: Embedded

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.embedded.prompt_tokens)

    def rows(self, dimensions: int | None = None) -> NDArray[np.float32]:
        """float32 [texts, width], each of length 1.

        dimensions: keep so many elements of each. InvalidRequest: there are fewer.
        """
        import numpy as np  # what serves chats alone does without it

        width = self.embedded.width
        whole = np.frombuffer(self.embedded.vectors, "<f4").reshape(-1, width)
        if dimensions is None or dimensions == width:
            return whole
        if dimensions > width:
            raise InvalidRequest(
                f"dimensions is {dimensions:,}, vectors of {self.model} have {width:,}: "
                "ask for at most that, or leave it out",
                param="dimensions",
            )
        cut = whole[:, :dimensions].astype(np.float64)
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
        async with manager.using(job.model) as (resident, info):
            entry.model = resident.file.name
            done = await _in_time(resident.engine, job)
            entry.outcome, entry.end = EMBEDDED, _end(done, info.ctx)
            return Vectors(entry.model, done)
    except LocalgenError as error:
        entry.outcome = error.code
        raise
    finally:
        journal.close(entry)


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


class EmbeddingResponse(Response):
    """POST /v1/embeddings. What goes wrong is raised, as an HTTP status.

    as_base64: little-endian float32 instead of lists of numbers.
    """

    def __init__(
        self,
        manager: ModelManager,
        journal: Journal,
        job: EmbedJob,
        *,
        dimensions: int | None,
        as_base64: bool,
    ) -> None:
        super().__init__()
        self._manager, self._journal, self._job = manager, journal, job
        self._dimensions, self._as_base64 = dimensions, as_base64

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancelled_on_disconnect(receive):
            vectors = await embed(self._manager, self._journal, self._job)
            # in a thread: it may be millions of numbers
            response = await asyncio.to_thread(self._rendered, vectors)
            await response(scope, receive, send)

    def _rendered(self, vectors: Vectors) -> Response:
        headers = {"X-Request-Id": self._job.request.id}
        body = openai.encode(self._body(vectors))
        return Response(body, 200, headers, "application/json")

    def _body(self, vectors: Vectors) -> dict[str, Any]:
        rows = vectors.rows(self._dimensions)
        shown: list[Any]
        if self._as_base64:
            shown = [base64.b64encode(row.tobytes()).decode() for row in rows]
        else:
            shown = rows.tolist()
        tokens = vectors.num_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(shown)
            ],
            "model": vectors.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "timings": vectors.embedded.timings,
        }
