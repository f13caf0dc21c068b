"""The routes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import localgen
from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import ModelInfo
from localgen.backends.types import EmbedRequest, EngineStats, Request
from localgen.server.http.access import Access
from localgen.server.http.errors import failure
from localgen.server.http.guard import Guard, Refused
from localgen.server.http.rate_limit import Rates
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.ollama.routes import OllamaApi
from localgen.server.openai import responses
from localgen.server.openai.responses import ChatFormat, CompletionFormat
from localgen.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadRequest,
    UnloadRequest,
    texts_of,
)
from localgen.server.requests.caller import Caller, is_local
from localgen.server.requests.choices import repeated
from localgen.server.requests.embeddings import EmbedJob, VectorsResponse
from localgen.server.requests.generation import GenerationResponse, Job
from localgen.server.requests.protocol import Format, encode, status_of
from localgen.server.requests.streaming import EventStream
from localgen.server.stats.metrics import CONTENT_TYPE, Metrics
from localgen.server.stats.request_log import Journal
from localgen.server.stats.server_state import ServerState

STATS_PERIOD_S = 0.25
_PROGRESS_PERIOD_S = 0.1
_log = logging.getLogger("localgen.server")


def create_app(
    manager: ModelManager,
    state: ServerState,
    access: Access,
    *,
    leave: Callable[[], None],
    leaving: Callable[[], bool],
) -> ASGIApp:
    """The application behind its door. leave: asks the server to end; leaving: whether it does."""
    rates = Rates(access.rate_limit)
    app = FastAPI(title="localgen", version=localgen.__version__, docs_url=None, redoc_url=None)
    metrics = Metrics(lambda: _engines(manager))
    manager.on_load = metrics.loaded
    _add_errors(app)
    _add_metrics(app, metrics)
    journal = Journal((metrics, rates, state.recent))
    _add_generation(app, manager, journal, access.timeout_s)
    _add_embeddings(app, manager, journal, access.timeout_s)
    _add_models(app, manager, state)
    _add_requests(app, manager)
    _add_server(app, state, leave, leaving)
    app.include_router(OllamaApi(manager, journal, access.timeout_s).router())
    return _arrival_noted(Guard(app, access, rates))


def _arrival_noted(app: ASGIApp) -> ASGIApp:
    """The application behind a clock: TTFT counts from before the body is read."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        scope["arrived_s"] = time.monotonic()
        await app(scope, receive, send)

    return noted


def _engines(manager: ModelManager) -> Iterator[tuple[str, EngineStats]]:
    for resident in manager.residents:
        if resident.engine.stats is not None:
            yield resident.file.name, resident.engine.stats


def _add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", response_model=None)
    async def figures() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _add_generation(
    app: FastAPI, manager: ModelManager, journal: Journal, timeout_s: float | None
) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, http: HttpRequest) -> Response:
        caller = Caller.of(http, body.user)
        request = Request(
            id=uuid.uuid4().hex[:24],
            **body.conversation(),
            params=body.to_params(),
            client=caller.client,
            priority=body.priority,
            ctx=body.ctx,
            arrived_s=caller.arrived_s,
        )
        return answer(body, [request], caller, ChatFormat.of)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        caller = Caller.of(http, body.user)
        request = Request(
            id=uuid.uuid4().hex[:24],
            params=body.to_params(),
            client=caller.client,
            priority=body.priority,
            ctx=body.ctx,
            arrived_s=caller.arrived_s,
        )
        requests = [
            replace(request, prompt=prompt)
            if isinstance(prompt, str)
            else replace(request, prompt_tokens=tuple(prompt))
            for prompt in body.prompts
        ]
        return answer(body, requests, caller, CompletionFormat.of)

    def answer(
        body: ChatRequest | CompletionRequest,
        requests: list[Request],
        caller: Caller,
        format_of: Callable[..., Format],
    ) -> Response:
        n = body.n or 1
        job = Job(
            id=requests[0].id,
            model=body.model,
            account=caller.account,
            timeout_s=timeout_s,
            requests=repeated(requests, n),
            n=n,
            stream=body.stream,
            format_of=partial(format_of, include_usage=body.include_usage),
            paths=caller.is_local,
        )
        return GenerationResponse(manager, journal, job)


def _add_embeddings(
    app: FastAPI, manager: ModelManager, journal: Journal, timeout_s: float | None
) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        caller = Caller.of(http, body.user)
        request = EmbedRequest(
            id=uuid.uuid4().hex[:24],
            inputs=texts_of(body.input),
            client=caller.client,
            arrived_s=caller.arrived_s,
        )
        job = EmbedJob(
            model=body.model,
            account=caller.account,
            timeout_s=timeout_s,
            request=request,
            dimensions=body.dimensions,
            paths=caller.is_local,
        )
        shown = partial(responses.embedding_list, as_base64=body.encoding_format == "base64")
        return VectorsResponse(manager, journal, job, shown)


def _add_models(app: FastAPI, manager: ModelManager, state: ServerState) -> None:
    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return _json({"object": "list", "data": await asyncio.to_thread(state.models)})

    # names have slashes: user/repo
    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str, http: HttpRequest) -> Response:
        paths = is_local(http.scope)
        return _json(await asyncio.to_thread(partial(state.model, name, paths=paths)))

    @app.post("/v1/models/load", response_model=None)
    async def load(body: LoadRequest, http: HttpRequest) -> Response:
        events = _load_events(manager, body, paths=is_local(http.scope))
        if body.stream:
            return EventStream(events, responses.SSE)
        return _json([event async for event in events][-1])

    @app.post("/v1/models/unload", response_model=None)
    async def unload(body: UnloadRequest) -> Response:
        return _json({"unloaded": await manager.unload(body.model)})


def _add_requests(app: FastAPI, manager: ModelManager) -> None:
    @app.post("/v1/requests/{request_id}/cancel", response_model=None)
    async def cancel(request_id: str) -> Response:
        return _json({"cancelled": manager.cancel(request_id)})


async def _load_events(
    manager: ModelManager, body: LoadRequest, *, paths: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """`{"progress": 0.43}` while it loads, then `{"model": …}`, a ModelInfo."""
    progress = 0.0

    def note(share: float) -> None:
        nonlocal progress
        progress = share

    async def load() -> ModelInfo:
        keep_alive = None if body.keep_alive is None else KeepAlive(body.keep_alive_s())
        options = body.to_options()
        using = manager.using(body.model, options, note, keep_alive, paths=paths)
        async with using as (_, info):
            return info

    loading = asyncio.create_task(load())
    try:
        while not (await asyncio.wait({loading}, timeout=_PROGRESS_PERIOD_S))[0]:
            yield {"progress": progress}
        yield {"model": loading.result()}
    finally:
        loading.cancel()


def _add_server(
    app: FastAPI, state: ServerState, leave: Callable[[], None], leaving: Callable[[], bool]
) -> None:
    @app.get("/health", response_model=None)
    async def health(http: HttpRequest) -> Response:
        # open to all who reach the port: they learn no more than this
        told = state.health() if is_local(http.scope) else {"status": state.status}
        if state.status == "ok":
            return _json(told)
        headers = {"Retry-After": "1"}
        return Response(encode(told), 503, headers, "application/json")

    @app.get("/livez", response_model=None)
    async def livez() -> Response:
        return _json({"status": "alive"})

    @app.get("/v1/stats", response_model=None)
    async def stats(stream: bool = False) -> Response:
        return EventStream(snapshots(), responses.SSE) if stream else _json(state.stats())

    @app.post("/v1/shutdown", response_model=None)
    async def shutdown(http: HttpRequest) -> Response:
        if not is_local(http.scope):
            message = "only clients on the Unix socket may end the server: localgen stop does"
            raise Refused(403, "forbidden", message)
        leave()
        return _json({"status": "shutting down"})

    async def snapshots() -> AsyncGenerator[dict[str, Any], None]:
        while not leaving():
            yield state.stats()
            await asyncio.sleep(STATS_PERIOD_S)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(LocalgenError)
    async def ours(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, LocalgenError)
        return _error(http, error.code, error.message, error.param)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # a misspelt field first: it also makes the right one missing
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        message, param = _validation(problems[0])
        return _error(http, "invalid_request", message, param)

    @app.exception_handler(HTTPException)
    async def refused(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, Refused):
            return error.response(http.url.path)
        assert isinstance(error, HTTPException)
        place = f"{http.method} {http.url.path}"
        match error.status_code:
            case 404:
                return _error(http, "not_found", f"there is no {place}")
            case 405:
                message = f"{place} is not allowed"
                return _error(http, "method_not_allowed", message, headers=error.headers)
            case _:
                return _error(http, "invalid_request", str(error.detail))

    @app.exception_handler(Exception)
    async def bug(http: HttpRequest, error: Exception) -> Response:
        # the traceback goes to the log: Starlette raises it again behind this answer
        message = f"{http.url.path} failed: the server's log says why"
        return _error(http, "internal_error", message)


def _validation(problem: Any) -> tuple[str, str | None]:
    """One line for the first thing that is wrong with a request, and the field it is in."""
    steps = [step for step in problem["loc"] if step not in ("body", "query", "str")]
    steps = [step for step in steps if not str(step).startswith("list[")]
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    field = field.removeprefix(".")
    match problem["type"]:
        case "json_invalid":
            return f"the body is not JSON: {problem['ctx']['error']}", None
        case "extra_forbidden":
            return f"unknown field {field}", field
        case "model_attributes_type" if not field:
            return "the body must be a JSON object, sent as Content-Type: application/json", None
        case "missing":
            return (f"{field} is missing", field) if field else ("the body is missing", None)
        case _:
            reason = str(problem["msg"])
            return (f"{field}: {reason}", field) if field else (reason, None)


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _error(
    http: HttpRequest, code: str, message: str, param: str | None = None, headers: Any = None
) -> Response:
    if status_of(code) in (429, 503):
        headers = {"Retry-After": "1"}
    return failure(http.url.path, code, message, param, headers=headers)
