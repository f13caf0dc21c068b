"""The FastAPI application: native and OpenAI-compatible routes, error handlers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from localgen.server.http import fastapi_import as fastapi_import  # before fastapi

# isort: split
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import localgen
from localgen.backends.engine_stats import EngineStats
from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Request
from localgen.server.anthropic.routes import AnthropicApi
from localgen.server.http.access import AccessPolicy
from localgen.server.http.error_handlers import add_error_handlers
from localgen.server.http.guard import GuardMiddleware, RequestRefused
from localgen.server.http.openapi import DescribedApp
from localgen.server.http.private_ports import Listener, PrivatePorts
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.llama_server.routes import LlamaServerApi
from localgen.server.models.disk_paths import without_paths
from localgen.server.models.engine_watch import silence_s
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive, ResidentModel
from localgen.server.ollama.routes import OllamaApi
from localgen.server.openai import serializer
from localgen.server.openai.embedding_schema import EmbeddingRequest, normalize_embedding_input
from localgen.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    LoadRequest,
    UnloadRequest,
)
from localgen.server.openai.serializer import ChatCompletionSerializer, CompletionSerializer
from localgen.server.requests.caller import Caller, is_local_request
from localgen.server.requests.choices import fan_out_requests, requests_of_prompts
from localgen.server.requests.embeddings import EmbeddingJob, EmbeddingResponse
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.presets import NamedSettings
from localgen.server.requests.protocol import ResponseSerializer, encode_json
from localgen.server.requests.reranking import RerankApi
from localgen.server.requests.streaming import EventStreamResponse, LastEventResponse
from localgen.server.responses_api.routes import ResponsesApi
from localgen.server.stats import loads
from localgen.server.stats.metrics import CONTENT_TYPE, Metrics
from localgen.server.stats.request_log import RequestLog
from localgen.server.stats.server_state import ServerState

if TYPE_CHECKING:
    from localgen.server.stats.trace_recorder import TraceRecorder

STATS_PERIOD_S = 0.25
_PROGRESS_PERIOD_S = 0.1


def create_app(
    manager: ModelManager,
    state: ServerState,
    access: AccessPolicy,
    *,
    trace: TraceRecorder | None = None,
    listen: Callable[[], Awaitable[Listener]],
    request_shutdown: Callable[[], None],
    is_shutting_down: Callable[[], bool],
) -> ASGIApp:
    """Build the ASGI application, wrapped in the guard middleware.

    trace: gets each answered prompt. listen: opens a loopback port. request_shutdown: starts the
    shutdown of the server. is_shutting_down: True once it has begun.
    """
    rates = RateLimiter(access.rate_limit)
    app = DescribedApp(
        title="localgen", version=localgen.__version__, docs_url=None, redoc_url=None
    )
    metrics = Metrics(lambda: _engine_stats(manager), manager.count_waiting)
    manager.on_load = metrics.on_load
    add_error_handlers(app)
    _add_metrics_route(app, metrics)
    totals = (state.token_totals,) if access.gateway_secret else ()
    observers = (metrics, rates, state.recent_requests, *totals, *((trace,) if trace else ()))
    journal = RequestLog(observers, metrics, trace.block_hash_key if trace else b"")
    _add_generation_routes(app, manager, journal, access.timeout_s)
    _add_embedding_routes(app, manager, journal, access.timeout_s)
    _add_model_routes(app, manager, state)
    _add_request_routes(app, manager)
    _add_server_routes(app, state, request_shutdown, is_shutting_down)
    app.include_router(OllamaApi(manager, journal, access.timeout_s).router())
    app.include_router(AnthropicApi(manager, journal, access.timeout_s).router())
    app.include_router(ResponsesApi(manager, journal, access.timeout_s).router())
    app.include_router(RerankApi(manager, journal, access.timeout_s).router())
    app.include_router(LlamaServerApi(manager, journal, access.timeout_s).router())
    ports = PrivatePorts(listen)
    _add_private_port_route(app, manager, ports, is_shutting_down, access.stabilize)
    guarded = GuardMiddleware(app, access, rates, ports)
    return _with_arrival(guarded, lambda port: access.stabilize or ports.stabilizes(port))


def _with_arrival(app: ASGIApp, stabilizes: Callable[[int], bool]) -> ASGIApp:
    """Record the arrival time before the body is read, so that TTFT includes reading it.

    Gives each request an id, which every response has as X-Request-Id. stabilizes: True for a port
    whose requests are stabilized.
    """

    async def arrive(scope: Scope, receive: Receive, send: Send) -> None:
        scope["stabilize"] = stabilizes((scope.get("server") or ("", 0))[1] or 0)
        scope["arrived_s"] = time.monotonic()
        scope["request_id"] = request_id = uuid.uuid4().hex[:24]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        await app(scope, receive, send_with_id)

    return arrive


def _engine_stats(manager: ModelManager) -> Iterator[tuple[str, EngineStats]]:
    for resident in manager.residents:
        if resident.engine.stats is not None:
            yield resident.file.name, resident.engine.stats


def _add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", response_model=None)
    async def render_metrics() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _add_generation_routes(
    app: FastAPI, manager: ModelManager, journal: RequestLog, timeout_s: float | None
) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/chat/completions", response_model=None)  # as in llama-server
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        request = caller.new_request(
            body.to_sampling_params(),
            **body.to_request_fields(),
            prompt_only=body.n_predict == 0,
            priority=body.priority,
            ctx=body.ctx,
            cache_salt=body.cache_salt or "",
            save_prefix=body.save_prefix,
            adapters=body.adapters,
            on_overflow=body.on_overflow,
        )
        return respond(body, [request], caller, ChatCompletionSerializer.from_metadata)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        request = caller.new_request(
            body.to_sampling_params(),
            echo=body.echo,
            prompt_only=body.n_predict == 0,
            infill=body.infill,
            priority=body.priority,
            ctx=body.ctx,
            cache_salt=body.cache_salt or "",
            save_prefix=body.save_prefix,
            adapters=body.adapters,
        )
        requests = requests_of_prompts(request, body.prompts)
        return respond(body, requests, caller, CompletionSerializer.from_metadata)

    def respond(
        body: ChatRequest | CompletionRequest,
        requests: list[Request],
        caller: Caller,
        format_of: Callable[..., ResponseSerializer],
    ) -> Response:
        n = body.n or 1
        job = GenerationJob(
            id=requests[0].id,
            model=body.model,
            account=caller.account,
            timeout_s=timeout_s,
            requests=fan_out_requests(requests, n),
            n=n,
            stream=body.stream,
            make_serializer=partial(format_of, include_usage=body.include_usage),
            allow_paths=caller.is_local,
        )
        return GenerationResponse(manager, journal, job)


def _add_embedding_routes(
    app: FastAPI, manager: ModelManager, journal: RequestLog, timeout_s: float | None
) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        job = EmbeddingJob(
            model=body.model,
            account=caller.account,
            timeout_s=timeout_s,
            request=caller.new_embed_request(normalize_embedding_input(body.input)),
            dimensions=body.dimensions,
            allow_paths=caller.is_local,
        )
        shown = partial(serializer.embedding_list_body, as_base64=body.encoding_format == "base64")
        return EmbeddingResponse(manager, journal, job, shown)


def _add_model_routes(app: FastAPI, manager: ModelManager, state: ServerState) -> None:
    @app.get("/v1/models", response_model=None)
    @app.get("/models", response_model=None)  # as in llama-server
    async def models(http: HttpRequest) -> Response:
        cards = await asyncio.to_thread(state.list_models, with_paths=is_local_request(http.scope))
        return _json_response({"object": "list", "data": cards})

    # names contain slashes: user/repo
    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str, http: HttpRequest) -> Response:
        paths = is_local_request(http.scope)
        return _json_response(await asyncio.to_thread(state.model_card, name, allow_paths=paths))

    @app.post("/v1/models/load", response_model=None)
    async def load(body: LoadRequest, http: HttpRequest) -> Response:
        is_local = is_local_request(http.scope)
        body.require_allowed(is_local=is_local)
        events = _load_events(manager, body, allow_paths=is_local)
        if body.stream:
            return EventStreamResponse(events, serializer.SSE)
        return LastEventResponse(events)

    @app.post("/v1/models/unload", response_model=None)
    async def unload(body: UnloadRequest, http: HttpRequest) -> Response:
        paths = is_local_request(http.scope)
        return _json_response({"unloaded": await manager.unload(body.model, allow_paths=paths)})


def _add_request_routes(app: FastAPI, manager: ModelManager) -> None:
    @app.post("/v1/requests/{request_id}/cancel", response_model=None)
    async def cancel(request_id: str, http: HttpRequest) -> Response:
        owner = Caller.from_request(http).key_account
        return _json_response({"cancelled": manager.cancel(request_id, owner)})

    @app.post("/v1/requests/{request_id}/answer-now", response_model=None)
    async def answer_now(request_id: str, http: HttpRequest) -> Response:
        owner = Caller.from_request(http).key_account
        return _json_response({"answering": manager.answer_now(request_id, owner)})


async def _load_events(
    manager: ModelManager, body: LoadRequest, *, allow_paths: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield `{"progress": 0.43}` while the model loads, then `{"model": ModelInfo}`.

    Each load ends with a progress of 1, however short; a model that was loaded has none.
    While it waits for memory, `waiting` is the reason. `silent_s` is null unless the engine that
    loads it is silent. allow_paths: take and give paths, for local clients.
    """
    # empty until the model is found: an error before that has a status of its own
    event: dict[str, Any] = {}
    default = {"progress": 0.0, "waiting": "", "silent_s": None}

    def show(resident: ResidentModel) -> None:
        event.update(progress=resident.engine.progress, silent_s=silence_s(resident))

    async def load() -> ModelInfo:
        name = manager.default_name if body.model is None else body.model
        named, own = await NamedSettings.find(name), body.to_load_options()
        acquired = manager.acquire(
            body.model,
            named.load_options(own),
            show,
            None if body.keep_alive is None else KeepAlive(body.keep_alive_s()),
            allow_paths=allow_paths,
            on_wait=lambda reason: event.update(waiting=reason),
        )
        try:
            async with acquired as (_, info):
                return named.shown(info)
        except LocalgenError as error:
            raise named.explained(error, own_ctx=own.ctx) from None

    loading = asyncio.create_task(load())
    try:
        while not (await asyncio.wait({loading}, timeout=_PROGRESS_PERIOD_S))[0]:
            if event:
                yield default | event
        info = loading.result()
        if event:
            yield default | {"progress": 1.0}
        yield {"model": info if allow_paths else without_paths(info)}
    finally:
        loading.cancel()


def _add_server_routes(
    app: FastAPI,
    state: ServerState,
    request_shutdown: Callable[[], None],
    is_shutting_down: Callable[[], bool],
) -> None:
    @app.get("/health", response_model=None)
    async def health(http: HttpRequest) -> Response:
        # open without a key: remote clients get the status only
        health_report = state.health() if is_local_request(http.scope) else {"status": state.status}
        if state.is_ready:
            return _json_response(health_report)
        headers = {"Retry-After": "1"}
        return Response(encode_json(health_report), 503, headers, "application/json")

    @app.get("/livez", response_model=None)
    async def livez() -> Response:
        return _json_response({"status": "alive"})

    @app.get("/v1/stats", response_model=None)
    async def stats(http: HttpRequest, stream: bool = False) -> Response:
        is_local = is_local_request(http.scope)
        if stream:
            return EventStreamResponse(snapshots(is_local), serializer.SSE)
        if http.scope["is_gateway"]:
            return _json_response(state.gateway_stats())
        return _json_response(state.stats(is_local=is_local))

    @app.get(loads.PATH, response_model=None)  # as in SGLang
    async def server_load(include: str | None = None) -> Response:
        sections = loads.read_sections(include)
        return _json_response(loads.loads_body(state.load(), sections))

    @app.post("/v1/shutdown", response_model=None)
    async def shutdown(http: HttpRequest) -> Response:
        _require_local(http, "shutdown is only allowed over the Unix socket: run localgen stop")
        request_shutdown()
        return _json_response({"status": "shutting down"})

    async def snapshots(is_local: bool) -> AsyncGenerator[dict[str, Any], None]:
        yield state.stats(is_local=is_local)
        while not is_shutting_down():
            await asyncio.sleep(STATS_PERIOD_S)
            yield state.stats(is_local=is_local)


def _add_private_port_route(
    app: FastAPI,
    manager: ModelManager,
    ports: PrivatePorts,
    is_shutting_down: Callable[[], bool],
    stabilizes_all: bool,
) -> None:
    @app.post("/v1/private-port", response_model=None)
    async def private_port(http: HttpRequest, stabilize: bool = False) -> Response:
        """A loopback port with a key, as long as the client reads the stream.

        stabilize: the requests that come there.
        """
        _require_local(http, "localgen launch opens ports over the Unix socket only")
        return EventStreamResponse(opened(stabilize), serializer.SSE)

    async def opened(stabilize: bool) -> AsyncGenerator[dict[str, str | bool], None]:
        with manager.activity():  # the server does not exit while the program may call it
            async with ports.open(stabilize=stabilize) as port:
                stabilized = stabilizes_all or stabilize
                yield {"url": port.url, "key": port.key, "stabilize": stabilized}
                while not is_shutting_down():
                    await asyncio.sleep(STATS_PERIOD_S)


def _require_local(http: HttpRequest, message: str) -> None:
    if not is_local_request(http.scope):
        raise RequestRefused(403, "forbidden", message)


def _json_response(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")
