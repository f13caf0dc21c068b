"""Routes of the Ollama API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
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
from localgen.hub import aliases
from localgen.hub.latest_tag import without_latest
from localgen.hub.reference import resolve_reference
from localgen.hub.remove import plan_removal, remove_name
from localgen.hub.resolve import (
    find_target,
    require_unused_name,
    resolve_model,
)
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.ollama import models
from localgen.server.ollama.embeddings import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    ollama_embed_body,
    ollama_embeddings_body,
)
from localgen.server.ollama.pull import PullEvent, stream_pull
from localgen.server.ollama.schema import (
    CopyRequest,
    DeleteRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    PullRequest,
    ShowRequest,
)
from localgen.server.ollama.serializer import (
    NDJSON,
    ContentBuilder,
    OllamaSerializer,
    chat_content,
    generate_content,
    load_response,
)
from localgen.server.requests.caller import Caller
from localgen.server.requests.embeddings import EmbeddingResponse
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.presets import NamedSettings
from localgen.server.requests.protocol import encode_json
from localgen.server.requests.streaming import (
    EventStreamResponse,
    LastEventResponse,
    cancel_on_disconnect,
)
from localgen.server.stats.request_log import RequestLog

# clients look for Ollama's own text, "Ollama is running"
GREETING = "localgen serves the Ollama API, as clients expect it where Ollama is running\n"


class _JsonRoute(APIRoute):
    """Parses every body as JSON: curl, as in Ollama's examples, sends it as a form."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(http: HttpRequest) -> Response:
            MutableHeaders(scope=http.scope)["content-type"] = "application/json"
            return await handler(HttpRequest(http.scope, http.receive))

        return handle


@dataclass(frozen=True, slots=True)
class OllamaApi:
    """Routes of the Ollama API. timeout_s: maximum duration of a request."""

    manager: ModelManager
    journal: RequestLog
    timeout_s: float | None

    def router(self) -> APIRouter:
        router = APIRouter(route_class=_JsonRoute, default_response_class=Response)
        self._add_generation_routes(router)
        self._add_embedding_routes(router)
        self._add_model_routes(router)
        self._add_file_routes(router)
        self._add_version_routes(router)
        return router

    def _add_generation_routes(self, router: APIRouter) -> None:
        @router.post("/api/chat", response_model=None)
        async def chat(body: OllamaChatRequest, http: HttpRequest) -> Response:
            if not body.messages:
                return await self._load_only(body, chat_content, http)
            return self._generate(body, chat_content, http)

        @router.post("/api/generate", response_model=None)
        async def generate(body: OllamaGenerateRequest, http: HttpRequest) -> Response:
            if not (body.prompt or body.suffix):
                return await self._load_only(body, generate_content, http)
            return self._generate(body, generate_content, http)

    def _generate(
        self,
        body: OllamaChatRequest | OllamaGenerateRequest,
        build_content: ContentBuilder,
        http: HttpRequest,
    ) -> Response:
        caller = Caller.from_request(http)
        request = caller.new_request(
            body.to_sampling_params(), **body.to_request_fields(), ctx=body.ctx
        )
        job = GenerationJob(
            id=request.id,
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            requests=(request,),
            options=body.to_load_options(),
            keep_alive=body.parsed_keep_alive,
            stream=body.is_streaming,
            make_serializer=partial(OllamaSerializer, body.model, build_content),
        )
        return GenerationResponse(self.manager, self.journal, job)

    async def _load_only(
        self,
        body: OllamaChatRequest | OllamaGenerateRequest,
        build_content: ContentBuilder,
        http: HttpRequest,
    ) -> Response:
        """Load a model, or unload it if keep_alive is 0."""
        if body.parsed_keep_alive == KeepAlive(0.0):
            await asyncio.to_thread(find_target, body.model, allow_paths=False)
            await self.manager.unload(body.model, when_idle=True)
            return _json_response(load_response(body.model, build_content, "unload"))
        named = await NamedSettings.find(body.model)
        options = named.load_options(body.to_load_options(), body.ctx)
        acquired = self.manager.acquire(body.model, options, keep_alive=body.parsed_keep_alive)
        async with cancel_on_disconnect(http.receive), acquired as (_, info):
            if body.ctx is not None and body.ctx > info.ctx:
                raise InvalidRequest(
                    f"num_ctx is {body.ctx:,}, {body.model} is loaded with {info.ctx:,} tokens: "
                    f"request at most {info.ctx:,}, or load it with a larger --ctx",
                    param="num_ctx",
                )
        return _json_response(load_response(body.model, build_content, "load"))

    def _add_embedding_routes(self, router: APIRouter) -> None:
        @router.post("/api/embed", response_model=None)
        async def embed(body: OllamaEmbedRequest, http: HttpRequest) -> Response:
            job = body.to_job(http, body.texts, self.timeout_s, body.dimensions)
            return EmbeddingResponse(
                self.manager, self.journal, job, partial(ollama_embed_body, body.model)
            )

        @router.post("/api/embeddings", response_model=None)
        async def embeddings(body: OllamaEmbeddingsRequest, http: HttpRequest) -> Response:
            job = body.to_job(http, (body.prompt,), self.timeout_s)
            return EmbeddingResponse(self.manager, self.journal, job, ollama_embeddings_body)

    def _add_model_routes(self, router: APIRouter) -> None:
        @router.get("/api/tags", response_model=None)
        async def tags() -> Response:
            return _json_response(
                await asyncio.to_thread(models.tags_response, self.manager.residents)
            )

        @router.get("/api/ps", response_model=None)
        async def running() -> Response:
            return _json_response(
                await asyncio.to_thread(models.ps_response, self.manager.residents)
            )

        @router.post("/api/show", response_model=None)
        async def show(body: ShowRequest) -> Response:
            return _json_response(
                await asyncio.to_thread(
                    models.show_response, body.requested_name, self.manager.residents
                )
            )

    def _add_file_routes(self, router: APIRouter) -> None:
        @router.post("/api/pull", response_model=None)
        async def pull(body: PullRequest) -> Response:
            lines = self._stream_pull(body.requested_name)
            return (
                LastEventResponse(lines)
                if body.stream is False
                else EventStreamResponse(lines, NDJSON)
            )

        @router.delete("/api/delete", response_model=None)
        async def delete(body: DeleteRequest) -> Response:
            await self._delete_model(body.requested_name, keep_files=body.keep_files)
            return Response()

        @router.post("/api/copy", response_model=None)
        async def copy(body: CopyRequest) -> Response:
            await self._copy_model(body.source, body.destination)
            return Response()

    async def _stream_pull(self, name: str) -> AsyncGenerator[PullEvent, None]:
        with self.manager.activity():  # a server without requests exits
            async with contextlib.aclosing(stream_pull(name)) as events:
                async for event in events:
                    yield event

    async def _copy_model(self, source: str, destination: str) -> None:
        """Add an alias. Raises InvalidRequest if the name already means a model."""
        name = without_latest(destination)
        loaded = self.manager.residents
        if any(name in (resident.file.name, resident.file_name) for resident in loaded):
            raise InvalidRequest(f"{name} is the name of another model: choose another name")
        await asyncio.to_thread(_add_alias, source, name)

    async def _delete_model(self, name: str, *, keep_files: bool) -> None:
        """keep_files: as for the other replicas of a cluster, before one of them removes them."""
        target = await asyncio.to_thread(find_target, name, allow_paths=False)
        if target.alias is not None:
            if not keep_files:
                await asyncio.to_thread(remove_name, target.alias)
            return
        found = await asyncio.to_thread(plan_removal, name, allow_paths=False)
        for resident in self.manager.residents:
            if resident.file.name == found.name:
                if not resident.is_idle:
                    raise ModelBusy(f"{found.name} is in use: try again when it is idle")
                await self.manager.unload(resident.id)
        if not keep_files:
            await asyncio.to_thread(found.execute)

    def _add_version_routes(self, router: APIRouter) -> None:
        @router.get("/", response_model=None)
        async def greeting() -> Response:
            return PlainTextResponse(GREETING)

        @router.get("/api/version", response_model=None)
        async def version() -> Response:
            return _json_response({"version": localgen.__version__})


def _add_alias(source: str, name: str) -> None:
    """Add an alias, unless it exists. The model may be a catalog or hub name, not installed.

    Raises ModelNotFound, or InvalidRequest if the name already means another model.
    """
    target = find_target(source, allow_paths=False)
    if target.is_path or resolve_reference(target.text) is None:
        resolve_model(source, allow_paths=False)  # raises the reason if it is not installed
    known = aliases.load_aliases()
    is_named = target.alias is not None and target.alias not in known
    meant = target.alias if is_named and target.alias else target.text
    # a copy that failed on another machine of a cluster is tried again
    if known.get(name) != meant or name == without_latest(source):
        require_unused_name(name)
        aliases.add_alias(name, meant)


def _json_response(value: object) -> Response:
    return Response(encode_json(value), media_type="application/json")
