"""The FastAPI application: native and OpenAI-compatible routes, error handlers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from localgen.server.http import fastapi_import as fastapi_import  # before fastapi

# isort: split
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import localgen
from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import ModelInfo
from localgen.backends.types import EngineStats, Request
from localgen.server.http.access import AccessPolicy
from localgen.server.http.errors import error_response
from localgen.server.http.guard import GuardMiddleware, RequestRefused
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.models.disk_paths import error_message, without_paths
from localgen.server.models.engine_watch import silence_s
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive, ResidentModel
from localgen.server.ollama.routes import OllamaApi
from localgen.server.openai import responses
from localgen.server.openai.responses import ChatCompletionSerializer, CompletionSerializer
from localgen.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadRequest,
    UnloadRequest,
    normalize_embedding_input,
)
from localgen.server.requests.caller import Caller, is_local_request
from localgen.server.requests.choices import fan_out_requests
from localgen.server.requests.embeddings import EmbeddingJob, EmbeddingResponse
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.protocol import ResponseSerializer, encode_json, http_status_for_code
from localgen.server.requests.streaming import EventStreamResponse, LastEventResponse
from localgen.server.stats.metrics import CONTENT_TYPE, Metrics
from localgen.server.stats.request_log import RequestLog
from localgen.server.stats.server_state import ServerState

STATS_PERIOD_S = 0.25
_PROGRESS_PERIOD_S = 0.1


def create_app(
    manager: ModelManager,
    state: ServerState,
    access: AccessPolicy,
    *,
    request_shutdown: Callable[[], None],
    is_shutting_down: Callable[[], bool],
) -> ASGIApp:
    """Build the ASGI application, wrapped in the guard middleware.

    request_shutdown: starts the shutdown of the server. is_shutting_down: True once it has begun.
    """
    rates = RateLimiter(access.rate_limit)
    app = FastAPI(title="localgen", version=localgen.__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(lambda: _engine_stats(manager), manager.count_waiting)
    manager.on_load = metrics.on_load
    _add_error_handlers(app)
    _add_metrics_route(app, metrics)
    journal = RequestLog((metrics, rates, state.recent_requests))
    _add_generation_routes(app, manager, journal, access.timeout_s)
    _add_embedding_routes(app, manager, journal, access.timeout_s)
    _add_model_routes(app, manager, state)
    _add_request_routes(app, manager)
    _add_server_routes(app, state, request_shutdown, is_shutting_down)
    app.include_router(OllamaApi(manager, journal, access.timeout_s).router())
    return _with_arrival(GuardMiddleware(app, access, rates))


def _with_arrival(app: ASGIApp) -> ASGIApp:
    """Record the arrival time before the body is read, so that TTFT includes reading it.

    Gives each request an id, which every response has as X-Request-Id.
    """

    async def arrive(scope: Scope, receive: Receive, send: Send) -> None:
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
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        request = caller.new_request(
            body.to_sampling_params(),
            **body.to_request_fields(),
            priority=body.priority,
            ctx=body.ctx,
            cache_salt=body.cache_salt or "",
        )
        return respond(body, [request], caller, ChatCompletionSerializer.from_metadata)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        caller = Caller.from_request(http, body.user)
        request = caller.new_request(
            body.to_sampling_params(),
            priority=body.priority,
            ctx=body.ctx,
            cache_salt=body.cache_salt or "",
        )
        requests = [
            replace(request, prompt=prompt)
            if isinstance(prompt, str)
            else replace(request, prompt_tokens=tuple(prompt))
            for prompt in body.prompts
        ]
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
        shown = partial(responses.embedding_list_body, as_base64=body.encoding_format == "base64")
        return EmbeddingResponse(manager, journal, job, shown)


def _add_model_routes(app: FastAPI, manager: ModelManager, state: ServerState) -> None:
    @app.get("/v1/models", response_model=None)
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
        events = _load_events(manager, body, allow_paths=is_local_request(http.scope))
        if body.stream:
            return EventStreamResponse(events, responses.SSE)
        return LastEventResponse(events)

    @app.post("/v1/models/unload", response_model=None)
    async def unload(body: UnloadRequest, http: HttpRequest) -> Response:
        paths = is_local_request(http.scope)
        return _json_response({"unloaded": await manager.unload(body.model, allow_paths=paths)})


def _add_request_routes(app: FastAPI, manager: ModelManager) -> None:
    @app.post("/v1/requests/{request_id}/cancel", response_model=None)
    async def cancel(request_id: str) -> Response:
        return _json_response({"cancelled": manager.cancel(request_id)})


async def _load_events(
    manager: ModelManager, body: LoadRequest, *, allow_paths: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield `{"progress": 0.43}` while the model loads, then `{"model": ModelInfo}`.

    While it waits for memory, `waiting` is the reason. `silent_s` is null unless the engine that
    loads it is silent. allow_paths: take and give paths, for local clients.
    """
    # empty until the model is found: an error before that has a status of its own
    event: dict[str, Any] = {}

    def show(resident: ResidentModel) -> None:
        event.update(progress=resident.engine.progress, silent_s=silence_s(resident))

    async def load() -> ModelInfo:
        acquired = manager.acquire(
            body.model,
            body.to_load_options(),
            show,
            None if body.keep_alive is None else KeepAlive(body.keep_alive_s()),
            allow_paths=allow_paths,
            on_wait=lambda reason: event.update(waiting=reason),
        )
        async with acquired as (_, info):
            return info

    loading = asyncio.create_task(load())
    try:
        while not (await asyncio.wait({loading}, timeout=_PROGRESS_PERIOD_S))[0]:
            if event:
                yield {"progress": 0.0, "waiting": "", "silent_s": None} | event
        info = loading.result()
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
        with_paths = is_local_request(http.scope)
        if stream:
            return EventStreamResponse(snapshots(with_paths), responses.SSE)
        return _json_response(state.stats(with_paths=with_paths))

    @app.post("/v1/shutdown", response_model=None)
    async def shutdown(http: HttpRequest) -> Response:
        if not is_local_request(http.scope):
            message = "shutdown is only allowed over the Unix socket: run localgen stop"
            raise RequestRefused(403, "forbidden", message)
        request_shutdown()
        return _json_response({"status": "shutting down"})

    async def snapshots(with_paths: bool) -> AsyncGenerator[dict[str, Any], None]:
        yield state.stats(with_paths=with_paths)
        while not is_shutting_down():
            await asyncio.sleep(STATS_PERIOD_S)
            yield state.stats(with_paths=with_paths)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LocalgenError)
    async def handle_localgen_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, LocalgenError)
        code, param = error.code, error.param
        is_local = is_local_request(http.scope)
        message = error_message(code, error.message, param, is_local=is_local)
        return _error_response(http, code, message, param)

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # unknown fields first: a misspelt field also makes the right one missing
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        message, param = _validation_message(problems[0])
        return _error_response(http, "invalid_request", message, param)

    @app.exception_handler(HTTPException)
    async def handle_http_error(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, RequestRefused):
            return error.to_response(http.url.path)
        assert isinstance(error, HTTPException)
        place = f"{http.method} {http.url.path}"
        match error.status_code:
            case 404:
                return _error_response(http, "not_found", f"no such endpoint: {place}")
            case 405:
                message = f"{place}: method not allowed"
                return _error_response(http, "method_not_allowed", message, headers=error.headers)
            case _:
                return _error_response(http, "invalid_request", str(error.detail))

    @app.exception_handler(Exception)
    async def handle_internal_error(http: HttpRequest, error: Exception) -> Response:
        # Starlette re-raises the error after this response, which logs the traceback
        message = f"{http.url.path} failed with an internal error: see the server log"
        return _error_response(http, "internal_error", message)


_JSON_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
}


def _validation_message(problem: Any) -> tuple[str, str | None]:
    """Return a one-line message for a pydantic error, and the path of its field if any."""
    steps = [step for step in problem["loc"] if step not in ("body", "query", "str")]
    steps = [step for step in steps if not str(step).startswith("list[")]
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    field = field.removeprefix(".")
    match problem["type"]:
        case "json_invalid":
            return f"the body is not valid JSON: {problem['ctx']['error']}", None
        case "extra_forbidden":
            return f"unknown field {field}", field
        case "model_attributes_type" if not field:
            return "the body must be a JSON object with Content-Type: application/json", None
        case "missing":
            return (f"{field} is missing", field) if field else ("the body is missing", None)
        case "greater_than_equal":
            return f"{field} must be at least {problem['ctx']['ge']:,}", field
        case "less_than_equal":
            return f"{field} must be at most {problem['ctx']['le']:,}", field
        case "less_than":
            return f"{field} must be below {problem['ctx']['lt']:,}", field
        case "int_type" | "float_type" | "bool_type" | "string_type" if field:
            return f"{field} must be {_JSON_TYPES[problem['type']]}", field
        case _:
            reason = str(problem["msg"])
            return (f"{field}: {reason}", field) if field else (reason, None)


def _json_response(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


def _error_response(
    http: HttpRequest, code: str, message: str, param: str | None = None, headers: Any = None
) -> Response:
    if http_status_for_code(code) in (429, 503):
        headers = {"Retry-After": "1"}
    return error_response(http.url.path, code, message, param, headers=headers)
