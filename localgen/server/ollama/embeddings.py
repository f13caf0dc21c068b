"""Ollama embeddings: /api/embed, and the older /api/embeddings."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.server.ollama.options import OllamaOptions, parse_ollama_keep_alive
from localgen.server.openai.embedding_schema import validate_embedding_input
from localgen.server.requests.body import RequestBody, reject_unsupported_fields
from localgen.server.requests.caller import Caller
from localgen.server.requests.embeddings import EmbeddingJob, EmbeddingVectors

# accepted but without effect: an input that is too long is always an error, never truncated
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"truncate": (False, True)}


class _OllamaEmbeddingBase(RequestBody):
    """Common fields. Only load options are allowed in `options`."""

    model: Annotated[str, Field(min_length=1)]
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported_fields(body, _UNSUPPORTED)

    def to_job(
        self,
        http: HttpRequest,
        inputs: tuple[str, ...],
        timeout_s: float | None,
        dimensions: int | None = None,
    ) -> EmbeddingJob:
        """Build the job. Raises InvalidRequest for options of text generation."""
        options = self.options or OllamaOptions()
        given = {**options.sampling_fields(), "num_ctx": options.num_ctx}
        for name, value in given.items():
            if value not in (None, ()):
                raise InvalidRequest(
                    f"{name} only applies to text generation: leave it out", param=name
                )
        caller = Caller.from_request(http)
        return EmbeddingJob(
            model=self.model,
            account=caller.account,
            timeout_s=timeout_s,
            request=caller.new_embed_request(inputs),
            dimensions=dimensions,
            options=options.to_load_options(),
            keep_alive=parse_ollama_keep_alive(self.keep_alive),
        )


class OllamaEmbedRequest(_OllamaEmbeddingBase):
    """POST /api/embed."""

    input: Annotated[str | list[str], BeforeValidator(validate_embedding_input)]
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)


class OllamaEmbeddingsRequest(_OllamaEmbeddingBase):
    """POST /api/embeddings."""

    prompt: str


def ollama_embed_body(model_name: str, vectors: EmbeddingVectors) -> dict[str, Any]:
    """Build the response of /api/embed. model_name: the client's name of the model."""
    return {
        "model": model_name,
        "embeddings": vectors.to_array().tolist(),
        "total_duration": round(vectors.total_ms * 1e6),
        "load_duration": round(vectors.load_ms * 1e6),
        "prompt_eval_count": vectors.num_tokens,
    }


def ollama_embeddings_body(vectors: EmbeddingVectors) -> dict[str, Any]:
    """Build the response of /api/embeddings."""
    return {"embedding": vectors.to_array()[0].tolist()}
