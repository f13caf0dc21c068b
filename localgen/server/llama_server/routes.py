"""Routes of llama-server and vLLM beside OpenAI's: tokens and text of a prompt, /completion, …"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

import localgen
from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Tokenized
from localgen.server.llama_server.completion import NativeCompletionSerializer
from localgen.server.llama_server.completion_schema import InfillRequest, NativeCompletionRequest
from localgen.server.llama_server.embeddings import NativeEmbeddingRequest, native_embedding_body
from localgen.server.llama_server.schema import ApplyTemplateBody, DetokenizeBody, TokenizeBody
from localgen.server.llama_server.state import find_loaded, props_body, slots_body
from localgen.server.models.manager import ModelManager
from localgen.server.requests.caller import Caller, is_local_request
from localgen.server.requests.choices import fan_out_requests, requests_of_prompts
from localgen.server.requests.embeddings import EmbeddingJob, EmbeddingResponse
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.protocol import encode_json
from localgen.server.requests.tokenizing import BodyBuilder, TokenizeJob, TokenizeResponse
from localgen.server.stats.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class LlamaServerApi:
    """The routes. timeout_s: maximum duration of a request."""

    manager: ModelManager
    journal: RequestLog
    timeout_s: float | None

    def router(self) -> APIRouter:
        router = APIRouter()
        self._add_token_routes(router)
        self._add_completion_routes(router)
        self._add_embedding_routes(router)
        self._add_state_routes(router)
        return router

    def _add_completion_routes(self, router: APIRouter) -> None:
        # llama-server's own form on both: OpenAI's is on /v1/completions
        @router.post("/completion", response_model=None)
        @router.post("/completions", response_model=None)
        async def completion(body: NativeCompletionRequest, http: HttpRequest) -> Response:
            return self._complete(body, Caller.from_request(http, body.user))

        @router.post("/infill", response_model=None)
        async def infill(body: InfillRequest, http: HttpRequest) -> Response:
            return self._complete(body, Caller.from_request(http, body.user))

    def _complete(self, body: NativeCompletionRequest, caller: Caller) -> Response:
        request = caller.new_request(
            body.to_sampling_params(),
            infill=body.infill,
            line_limits=body.line_limits,
            prompt_only=body.n_predict == 0,
            priority=body.priority,
            ctx=body.ctx,
            cache_salt=body.cache_salt or "",
            save_prefix=body.save_prefix,
            adapters=body.adapters,
        )
        n = body.n or 1
        job = GenerationJob(
            id=request.id,
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            requests=fan_out_requests(requests_of_prompts(request, body.prompts), n),
            n=n,
            stream=body.stream,
            make_serializer=partial(NativeCompletionSerializer.from_metadata, body=body),
            allow_paths=caller.is_local,
        )
        return GenerationResponse(self.manager, self.journal, job)

    def _add_embedding_routes(self, router: APIRouter) -> None:
        @router.post("/embedding", response_model=None)
        @router.post("/embeddings", response_model=None)
        async def embeddings(body: NativeEmbeddingRequest, http: HttpRequest) -> Response:
            caller = Caller.from_request(http)
            job = EmbeddingJob(
                model=body.model,
                account=caller.account,
                timeout_s=self.timeout_s,
                request=caller.new_embed_request(body.inputs()),
                allow_paths=caller.is_local,
            )
            return EmbeddingResponse(self.manager, self.journal, job, native_embedding_body)

    def _add_state_routes(self, router: APIRouter) -> None:
        @router.get("/props", response_model=None)
        async def props(http: HttpRequest, model: str | None = None) -> Response:
            paths = is_local_request(http.scope)
            found = await find_loaded(self.manager, model, allow_paths=paths)
            return _json_response(props_body(*found, model))

        @router.get("/slots", response_model=None)
        async def slots(http: HttpRequest, model: str | None = None) -> Response:
            paths = is_local_request(http.scope)
            found = await find_loaded(self.manager, model, allow_paths=paths)
            return _json_response(slots_body(*found))

        @router.get("/version", response_model=None)
        async def version() -> Response:
            return _json_response({"version": localgen.__version__})

    def _add_token_routes(self, router: APIRouter) -> None:
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


def _json_response(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")
