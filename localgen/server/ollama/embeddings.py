"""Vectors of texts, in Ollama's protocol: /api/embed, and /api/embeddings as older clients ask."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from pydantic import BeforeValidator, Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import EmbedRequest as EngineRequest
from localgen.server.ollama.options import Options, parse_ollama_keep_alive
from localgen.server.ollama.schema import Name
from localgen.server.openai.schema import checked
from localgen.server.requests.body import Body, without_unsupported
from localgen.server.requests.caller import Caller
from localgen.server.requests.embeddings import EmbedJob, Vectors

# a text that is too long is an error either way: cut, it would be another text
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"truncate": (False, True)}


class _Embed(Body):
    """What both share. Of the options, only those that say how a model is loaded mean anything."""

    model: Annotated[Name, Field(min_length=1)]
    options: Options | None = None
    keep_alive: float | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        return without_unsupported(body, _UNSUPPORTED)

    def job(
        self,
        http: HttpRequest,
        inputs: tuple[str, ...],
        timeout_s: float | None,
        dimensions: int | None = None,
    ) -> EmbedJob:
        """InvalidRequest: an option that says how text is generated."""
        options = self.options or Options()
        given = {**options.sampling(), "num_ctx": options.num_ctx}
        for name, value in given.items():
            if value not in (None, ()):
                raise InvalidRequest(f"{name} is for generating text: leave it out", param=name)
        caller = Caller.of(http)
        return EmbedJob(
            model=self.model,
            account=caller.account,
            timeout_s=timeout_s,
            request=EngineRequest(
                id=uuid.uuid4().hex[:24],
                inputs=inputs,
                client=caller.client,
                arrived_s=caller.arrived_s,
            ),
            dimensions=dimensions,
            options=options.load(),
            keep_alive=parse_ollama_keep_alive(self.keep_alive),
        )


class EmbedRequest(_Embed):
    """POST /api/embed."""

    input: Annotated[str | list[str], BeforeValidator(checked)]
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)


class EmbeddingsRequest(_Embed):
    """POST /api/embeddings."""

    prompt: str


def embedded(name: str, vectors: Vectors) -> dict[str, Any]:
    """The answer of /api/embed; name: the model as the client calls it."""
    timings = vectors.embedded.timings
    return {
        "model": name,
        "embeddings": vectors.rows().tolist(),
        "total_duration": round((timings.queue_ms + timings.prompt_ms) * 1e6),
        "load_duration": 0,
        "prompt_eval_count": vectors.num_tokens,
    }


def one_embedded(vectors: Vectors) -> dict[str, Any]:
    """The answer of /api/embeddings."""
    return {"embedding": vectors.rows()[0].tolist()}
