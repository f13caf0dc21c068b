"""The routes of Ollama's protocol."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, Response

import localgen
from localgen.backends.errors import InvalidRequest, ModelBusy
from localgen.backends.types import Request
from localgen.hub import aliases
from localgen.hub.reference import reference
from localgen.hub.remove import removal
from localgen.hub.resolve import BUILT_IN, LATEST, is_here, meant, own_name, resolve
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.ollama import models
from localgen.server.ollama.embeddings import (
    EmbeddingsRequest,
    EmbedRequest,
    embedded,
    one_embedded,
)
from localgen.server.ollama.pull import pulled
from localgen.server.ollama.responses import NDJSON, AnswerFormat, Piece, loaded, message, response
from localgen.server.ollama.schema import (
    ChatRequest,
    CopyRequest,
    DeleteRequest,
    GenerateRequest,
    PullRequest,
    ShowRequest,
)
from localgen.server.requests.caller import Caller
from localgen.server.requests.embeddings import VectorsResponse
from localgen.server.requests.generation import GenerationResponse, Job
from localgen.server.requests.protocol import encode
from localgen.server.requests.streaming import EventStream, LastEvent
from localgen.server.stats.request_log import Journal

# the words that clients look for are Ollama's own
GREETING = "localgen answers Ollama's protocol here, as clients expect it where Ollama is running\n"


class _JsonRoute(APIRoute):
    """Takes any body for JSON: curl, as Ollama's own examples use it, calls it a form."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(http: HttpRequest) -> Response:
            MutableHeaders(scope=http.scope)["content-type"] = "application/json"
            return await handler(HttpRequest(http.scope, http.receive))

        return handle


@dataclass(frozen=True, slots=True)
class OllamaApi:
    """timeout_s: how long a request may take."""

    manager: ModelManager
    journal: Journal
    timeout_s: float | None

    def router(self) -> APIRouter:
        """All of them."""
        router = APIRouter(route_class=_JsonRoute, default_response_class=Response)
        self._add_generation(router)
        self._add_vectors(router)
        self._add_models(router)
        self._add_files(router)
        self._add_greetings(router)
        return router

    def _add_generation(self, router: APIRouter) -> None:
        @router.post("/api/chat", response_model=None)
        async def chat(body: ChatRequest, http: HttpRequest) -> Response:
            if not body.messages:
                return await self._only_load(body, message)
            return self._answer(body, message, http)

        @router.post("/api/generate", response_model=None)
        async def generate(body: GenerateRequest, http: HttpRequest) -> Response:
            if not body.prompt:
                return await self._only_load(body, response)
            return self._answer(body, response, http)

    def _answer(
        self, body: ChatRequest | GenerateRequest, piece: Piece, http: HttpRequest
    ) -> Response:
        caller = Caller.of(http)
        request = Request(
            id=uuid.uuid4().hex[:24],
            **body.conversation(),
            params=body.to_params(),
            client=caller.client,
            ctx=body.ctx,
            arrived_s=caller.arrived_s,
        )
        job = Job(
            id=request.id,
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            requests=(request,),
            options=body.load(),
            keep_alive=body.idle,
            stream=body.streams,
            format_of=partial(AnswerFormat, body.model, piece),
        )
        return GenerationResponse(self.manager, self.journal, job)

    async def _only_load(self, body: ChatRequest | GenerateRequest, piece: Piece) -> Response:
        """Load a model, or let it go where it shall not stay."""
        if body.idle == KeepAlive(0.0):
            await self.manager.unload(body.model, when_idle=True)
            return _json(loaded(body.model, piece, "unload"))
        using = self.manager.using(body.model, body.load(), keep_alive=body.idle)
        async with using as (_, info):
            if body.ctx is not None and body.ctx > info.ctx:
                raise InvalidRequest(
                    f"num_ctx is {body.ctx:,}, {body.model} is loaded with {info.ctx:,} tokens: "
                    f"ask for at most {info.ctx:,}, or stop it and load it with a larger --ctx",
                    param="num_ctx",
                )
        return _json(loaded(body.model, piece, "load"))

    def _add_vectors(self, router: APIRouter) -> None:
        @router.post("/api/embed", response_model=None)
        async def embed(body: EmbedRequest, http: HttpRequest) -> Response:
            job = body.job(http, body.texts, self.timeout_s, body.dimensions)
            return VectorsResponse(self.manager, self.journal, job, partial(embedded, body.model))

        @router.post("/api/embeddings", response_model=None)
        async def embeddings(body: EmbeddingsRequest, http: HttpRequest) -> Response:
            job = body.job(http, (body.prompt,), self.timeout_s)
            return VectorsResponse(self.manager, self.journal, job, one_embedded)

    def _add_models(self, router: APIRouter) -> None:
        @router.head("/api/tags", include_in_schema=False)
        @router.get("/api/tags", response_model=None)
        async def tags() -> Response:
            return _json(await asyncio.to_thread(models.tags, self.manager.residents))

        @router.get("/api/ps", response_model=None)
        async def running() -> Response:
            return _json(await asyncio.to_thread(models.running, self.manager.residents))

        @router.post("/api/show", response_model=None)
        async def show(body: ShowRequest) -> Response:
            return _json(await asyncio.to_thread(models.shown, body.wanted))

    def _add_files(self, router: APIRouter) -> None:
        @router.post("/api/pull", response_model=None)
        async def pull(body: PullRequest) -> Response:
            lines = pulled(body.wanted)
            return LastEvent(lines) if body.stream is False else EventStream(lines, NDJSON)

        @router.delete("/api/delete", response_model=None)
        async def delete(body: DeleteRequest) -> Response:
            await self._delete(body.wanted)
            return Response()

        @router.post("/api/copy", response_model=None)
        async def copy(body: CopyRequest) -> Response:
            await asyncio.to_thread(_copy, body.source, body.destination)
            self._forget(body.destination)
            return Response()

    def _forget(self, name: str) -> None:
        """A name means another model now, or none."""
        plain = name.removesuffix(LATEST)
        for spelling in (plain, plain + LATEST):
            self.manager.forget_name(spelling)

    async def _delete(self, name: str) -> None:
        own = await asyncio.to_thread(own_name, name)
        if own is not None:
            await asyncio.to_thread(aliases.remove, own)
            self._forget(own)
            return
        found = await asyncio.to_thread(removal, name)
        for resident in self.manager.residents:
            if resident.file.name == found.name:
                if not resident.idle:
                    raise ModelBusy(f"{found.name} is in use: try again when it is not")
                await self.manager.unload(resident.id)
        await asyncio.to_thread(found.execute)

    def _add_greetings(self, router: APIRouter) -> None:
        @router.head("/", include_in_schema=False)
        @router.get("/", response_model=None)
        async def greeting() -> Response:
            return PlainTextResponse(GREETING)

        @router.head("/api/version", include_in_schema=False)
        @router.get("/api/version", response_model=None)
        async def version() -> Response:
            return _json({"version": localgen.__version__})


def _copy(source: str, destination: str) -> None:
    """Another name for a model, here or not. ModelNotFound, InvalidRequest."""
    name = destination.removesuffix(LATEST)
    if name == BUILT_IN:
        raise InvalidRequest(f"{BUILT_IN} is the built-in model: choose another name")
    model = meant(source)
    if not is_here(model) and reference(model) is None:
        resolve(model)  # it says why not
    aliases.add(name, model)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
