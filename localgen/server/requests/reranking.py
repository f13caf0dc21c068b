"""Reranking: documents in the order of their relevance for a query, as Jina and Cohere have it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from localgen.backends.errors import InvalidRequest
from localgen.server.models.manager import ModelManager
from localgen.server.requests.body import RequestBody, StrictModel
from localgen.server.requests.caller import Caller
from localgen.server.requests.embeddings import EmbeddingJob, EmbeddingResponse, EmbeddingVectors
from localgen.server.stats.request_log import RequestLog

MAX_DOCUMENTS = 2048
_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")


class Document(StrictModel):
    """A document as an object."""

    text: str


def _as_documents(value: Any) -> Any:
    """Convert texts to documents. Raises InvalidRequest for what is neither."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("documents must be a list of texts", param="documents")
    if len(value) > MAX_DOCUMENTS:
        raise InvalidRequest(
            f"there are {len(value):,} documents, the limit is {MAX_DOCUMENTS:,}: "
            "send several requests",
            param="documents",
        )
    for at, each in enumerate(value):
        if not isinstance(each, (str, dict)):
            place = f"documents[{at}]"
            raise InvalidRequest(f"{place} is neither a text nor an object", param=place)
    return [{"text": each} if isinstance(each, str) else each for each in value]


class RerankRequest(RequestBody):
    """POST /v1/rerank. top_n: maximum number of documents in the answer, the most relevant ones."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[Document], BeforeValidator(_as_documents)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class RerankApi:
    """The routes. timeout_s: maximum duration of a request."""

    manager: ModelManager
    journal: RequestLog
    timeout_s: float | None

    def router(self) -> APIRouter:
        router = APIRouter()
        for path in _PATHS:
            router.add_api_route(path, self._rerank, methods=["POST"], response_model=None)
        return router

    async def _rerank(self, body: RerankRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        texts = tuple(document.text for document in body.documents)
        job = EmbeddingJob(
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            request=caller.new_embed_request(texts, body.query),
            allow_paths=caller.is_local,
        )
        return EmbeddingResponse(
            self.manager, self.journal, job, partial(_rerank_body, caller.request_id, body)
        )


def _rerank_body(request_id: str, body: RerankRequest, vectors: EmbeddingVectors) -> dict[str, Any]:
    """Build the response: the best document first."""
    scores = vectors.scores()
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]].text}
    return {
        "id": f"rerank-{request_id}",
        "object": "list",
        "model": vectors.model,
        "results": results,
        "usage": {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens},
    }
