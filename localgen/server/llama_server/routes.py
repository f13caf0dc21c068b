"""Routes of llama-server and vLLM for agent authors: the tokens and the text of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Tokenized
from localgen.server.llama_server.schema import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from localgen.server.models.manager import ModelManager
from localgen.server.requests.caller import Caller
from localgen.server.requests.tokenizing import BodyBuilder, TokenizeJob, TokenizeResponse


@dataclass(frozen=True, slots=True)
class LlamaServerApi:
    """The routes. timeout_s: maximum duration of a request."""

    manager: ModelManager
    timeout_s: float | None

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post("/tokenize", response_model=None)
        async def tokenize(body: TokenizeBody, http: HttpRequest) -> Response:
            shown = _tokens_with_pieces if body.with_pieces else _tokens
            return self._respond(body.model, http, body.to_request_fields(), shown)

        @router.post("/detokenize", response_model=None)
        async def detokenize(body: DetokenizeBody, http: HttpRequest) -> Response:
            return self._respond(body.model, http, {"prompt_tokens": tuple(body.tokens)}, _text)

        @router.post("/apply-template", response_model=None)
        async def apply_template(body: ApplyTemplateBody, http: HttpRequest) -> Response:
            return self._respond(body.model, http, body.to_request_fields(), _prompt)

        return router

    def _respond(
        self, model: str | None, http: HttpRequest, fields: dict[str, Any], shown: BodyBuilder
    ) -> Response:
        caller = Caller.from_request(http)
        job = TokenizeJob(
            model=model,
            request=caller.new_tokenize_request(**fields),
            timeout_s=self.timeout_s,
            allow_paths=caller.is_local,
        )
        return TokenizeResponse(self.manager, job, shown)


def _tokens(tokenized: Tokenized, info: ModelInfo) -> dict[str, Any]:
    tokens = tokenized.tokens
    return {"tokens": tokens, "count": len(tokens), "max_model_len": info.ctx}


def _tokens_with_pieces(tokenized: Tokenized, info: ModelInfo) -> dict[str, Any]:
    """As llama-server: a piece that is no whole characters is given as bytes."""
    tokens = [
        {"id": token, "piece": _piece(piece)}
        for token, piece in zip(tokenized.tokens, tokenized.pieces, strict=True)
    ]
    return _tokens(tokenized, info) | {"tokens": tokens}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _text(tokenized: Tokenized, info: ModelInfo) -> dict[str, Any]:
    # content: llama-server, prompt: vLLM
    return {"content": tokenized.text, "prompt": tokenized.text}


def _prompt(tokenized: Tokenized, info: ModelInfo) -> dict[str, Any]:
    return {"prompt": tokenized.text}
