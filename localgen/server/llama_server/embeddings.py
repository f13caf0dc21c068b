"""/embeddings in llama-server's own format; OpenAI's is on /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.server.openai.embedding_schema import (
    normalize_embedding_input,
    validate_embedding_input,
)
from localgen.server.requests.body import RequestBody
from localgen.server.requests.embeddings import EmbeddingVectors

_Input = Annotated[
    str | list[str] | list[int] | list[list[int] | str], BeforeValidator(validate_embedding_input)
]


class NativeEmbeddingRequest(RequestBody):
    """POST /embedding. content, input: a string, token ids, or a list of either.

    embd_normalize: 2, the Euclidean norm, as all embeddings have it here.
    """

    model: str | None = None
    content: _Input | None = None
    input: _Input | None = None
    encoding_format: Literal["float"] | None = None
    embd_normalize: Literal[2] | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if (self.content is None) == (self.input is None):
            raise InvalidRequest("give content or input", param="content")
        return self

    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        """One item per embedding."""
        return normalize_embedding_input(self.input if self.content is None else self.content)


def native_embedding_body(vectors: EmbeddingVectors) -> list[dict[str, Any]]:
    """Build the response: a list, each embedding one row, as where tokens are pooled."""
    rows = vectors.to_array().tolist()
    return [{"index": index, "embedding": [row]} for index, row in enumerate(rows)]
