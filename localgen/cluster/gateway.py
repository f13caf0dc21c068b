"""The gateway: checks each request as a server does, and passes it to the replica of its prefix."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import httpx
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import LocalgenError, NotFound, ServerUnavailable, TimedOut
from localgen.backends.text.stabilizer import stabilize_fields
from localgen.cluster.draining import Drain
from localgen.cluster.exchange import ENDED, CommonExchange, Exchange
from localgen.cluster.incoming import MAX_SENT_CHUNKS, Incoming, gateway_headers, json_object
from localgen.cluster.managing import Plan, ReplicaRequest, plan_for
from localgen.cluster.posted import NotEverywhere, Posted, common_answer, require_everywhere
from localgen.cluster.prefix_table import prompt_chunks
from localgen.cluster.replica_client import create_client
from localgen.cluster.route import Asked, Choice
from localgen.cluster.totals import PS_PATH, merged_loads, merged_metrics, merged_ps, merged_stats
from localgen.server.http.errors import error_response
from localgen.server.http.guard import PUBLIC_PATHS, RequestRefused
from localgen.server.requests.protocol import encode_json
from localgen.server.stats import loads
from localgen.server.stats.metrics import CONTENT_TYPE

# requests whose replica is remembered: to cancel one, or to continue an answer that it stores
_MAX_REQUESTS = 10_000
_MAX_TRIES = 3
# whose prompts another replica may compute
_GENERATING_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/chat/completions", "/completions", "/completion", "/infill"),
        *("/api/chat", "/api/generate"),
    )
)
# without a prompt replica for this time, the one that answers computes the prompt
_PROMPT_CHOICE_S = 1.0
# fewer new chunks are computed by the replica that answers: about 512 tokens
MIN_PROMPT_CHUNKS = 8
_NO_PATH = "paths have no . and .. here: send the path as it is"
# answered by the gateway: a probe must start no replica where there is none
_ALIVE = Response(encode_json({"status": "ok"}), media_type="application/json")
_log = logging.getLogger("localgen.cluster")
_OWN_ID = re.compile(r"/v1/(?:requests|responses)/(?:resp_)?([0-9a-zA-Z]+)")


# the second argument: replicas that do not answer
Choose = Callable[[Asked, frozenset[str]], AbstractAsyncContextManager[Choice]]
# a path; the name and the body of each replica's answer
AskAll = Callable[[str], Awaitable[Sequence[tuple[str, bytes]]]]
# the answers of all replicas that get it
SendAll = Callable[[ReplicaRequest], Awaitable[Sequence[Posted]]]


class Gateway:
    """An ASGI application that forwards to replicas; access is checked before it.

    choose_for_prompt: of the replicas that compute prompts for the others; None without any.
    send_all: requests that manage models; None if replicas are not localgen's servers.
    default_names: of the model that all replicas have. secret: tells replicas that a request comes
    from here; None if they are not localgen's servers. replica_key: the only key that those take.
    stabilizes: as replicas do, which then have the same prefix for prompts that differ in dates.
    timeout_s: maximum duration of a request, which replicas know as well.
    """

    def __init__(
        self,
        choose: Choose,
        ask_all: AskAll,
        choose_for_prompt: Choose | None = None,
        send_all: SendAll | None = None,
        *,
        default_names: Collection[str] = ("",),
        secret: str | None = None,
        replica_key: str | None = None,
        stabilizes: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._choose, self._ask_all = choose, ask_all
        self._choose_for_prompt, self._send_all = choose_for_prompt, send_all
        self._default_names = default_names
        self._secret = secret
        self._replica_key = replica_key
        self._stabilizes, self._timeout_s = stabilizes, timeout_s
        self._client = create_client()
        self._replica_by_request: OrderedDict[str, Choice] = OrderedDict()
        self._drain = Drain()

    def drain(self) -> int:
        """Refuse new requests from now on. Returns the number of running ones."""
        return self._drain.begin()

    async def end(self) -> None:
        """End the running requests with an error, and wait until it is sent."""
        await self._drain.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, scope["arrived_s"] = scope["path"], time.monotonic()
        if not {".", ".."}.isdisjoint(path.split("/")):  # clients of HTTP resolve them
            await error_response(path, NotFound.code, _NO_PATH)(scope, receive, send)
            return
        if path in PUBLIC_PATHS:
            response = self._drain.health() if path == "/health" else _ALIVE
            await response(scope, receive, send)
            return
        if (refusal := self._drain.refusal(scope["method"], path)) is not None:
            await refusal(scope, receive, send)
            return
        if path in ("/v1/stats", "/metrics") or (path == PS_PATH and self._send_all is not None):
            await self._total(path, await self._ask_all(path))(scope, receive, send)
            return
        if path == loads.PATH:
            await (await self._loads_response(scope))(scope, receive, send)
            return
        try:
            body = await _read_body(receive)
        except RequestRefused as refused:
            await refused.to_response(path)(scope, receive, send)
            return
        if (refusal := self._drain.refusal(scope["method"], path)) is not None:  # meanwhile
            await refusal(scope, receive, send)
            return
        # parsed before anything is awaited: a large body has its turn only until then
        incoming = self._parse(scope, body)
        answering = asyncio.create_task(self._answer(incoming, receive, send))
        self._drain.add(answering)
        leaving = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # the replica notices that its connection is closed, and stops
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        if not answering.cancelled():
            with suppress(asyncio.CancelledError):
                await answering

    def _parse(self, scope: Scope, body: bytes) -> Incoming:
        fields = json_object(body)
        known = fields or {}
        model = self._model_name(known)
        prompt = known
        if self._stabilizes:
            with suppress(RecursionError):  # the replica refuses it
                prompt = stabilize_fields(known)
        chunks = prompt_chunks({**prompt, "model": model})
        owner = self._owner(scope["path"], known)
        # what is not reported is not routed by either
        asked = Asked(chunks[:MAX_SENT_CHUNKS], model, owner.replica if owner else None)
        return Incoming(scope, body, fields, chunks, asked, owner)

    async def _answer(self, incoming: Incoming, receive: Receive, send: Send) -> None:
        scope, path = incoming.scope, incoming.path
        plan = self._plan(incoming)
        try:
            if plan is None or plan.is_streamed:
                await self._answer_by_one(incoming, send, plan)
            elif (answer := await self._answer_by_all(plan)) is not None:
                response = Response(answer.body, answer.status, media_type="application/json")
                await response(scope, receive, send)
            else:  # one is started for it
                await self._answer_by_one(incoming, send)
        except NotEverywhere as error:
            await error.to_response(path)(scope, receive, send)
        except LocalgenError as error:
            await error_response(path, error.code, error.message)(scope, receive, send)

    def _plan(self, incoming: Incoming) -> Plan | None:
        if self._send_all is None or incoming.fields is None or not incoming.is_parsed:
            return None
        method, is_own_model = incoming.scope["method"], not incoming.asked.model
        return plan_for(method, incoming.path, incoming.fields, is_own_model=is_own_model)

    async def _answer_by_one(
        self, incoming: Incoming, send: Send, plan: Plan | None = None
    ) -> None:
        """plan: what the other replicas do meanwhile, until the client leaves."""
        async with AsyncExitStack() as stack:
            exchange = Exchange(incoming.path, send)
            if plan is not None and self._send_all is not None:
                elsewhere = asyncio.ensure_future(self._send_all(plan.requests[0]))
                stack.callback(elsewhere.cancel)
                exchange = CommonExchange(incoming.path, send, elsewhere)
            try:
                with self._drain.cutting():
                    await self._try_replicas(incoming, exchange)
            except ServerUnavailable as error:
                if not exchange.has_started:
                    raise
                await exchange.fail(error.message)

    async def _answer_by_all(self, plan: Plan) -> Posted | None:
        """Returns None if there is no replica; raises NotEverywhere if some have failed."""
        assert self._send_all is not None
        answer = None
        for request in plan.requests:
            with self._drain.cutting():
                posted = await self._send_all(request)
            require_everywhere(posted, may_lack=plan.may_lack)
            answer = common_answer(posted)
            if answer is None or not answer.is_success:
                return answer
        return answer

    async def _try_replicas(self, incoming: Incoming, exchange: Exchange) -> None:
        """Raises ServerUnavailable without a replica that answers, and the exchange's errors."""
        gone: set[str] = set()
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                async with self._choose_in_time(incoming, frozenset(gone)) as chosen:
                    choice = incoming.owner_or(chosen, gone)
                    gone.add(choice.replica)
                    kv_peer = await self._prompt_address(choice, incoming)
                    await self._forward(
                        choice, incoming, kv_peer, exchange, can_retry=tries_left > 0
                    )
                return
            except httpx.HTTPError as error:
                if exchange.has_started:
                    await exchange.fail(ENDED)
                    return
                if not tries_left:
                    raise ServerUnavailable(ENDED) from error

    @asynccontextmanager
    async def _choose_in_time(
        self, incoming: Incoming, gone: frozenset[str]
    ) -> AsyncIterator[Choice]:
        """Raises TimedOut if it waits longer for a replica than the request may take."""
        left_s = None
        if self._timeout_s is not None:
            left_s = incoming.scope["arrived_s"] + self._timeout_s - time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(left_s):
                    choosing = self._choose(incoming.asked, gone)
                    choice = await stack.enter_async_context(choosing)
            except TimeoutError:
                if self._timeout_s is None:
                    raise
                message = f"the request timed out, the limit is {self._timeout_s:g} s"
                raise TimedOut(message) from None
            yield choice

    async def _prompt_address(self, choice: Choice, incoming: Incoming) -> str:
        """Where the chosen replica should fetch the beginning of the prompt, or empty.

        If much of it is new, another replica computes it first. If that fails, the chosen one does.
        """
        if self._choose_for_prompt is None or not _has_long_prompt(choice, incoming):
            return choice.kv_peer
        asked = replace(incoming.asked, wanted=None)
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_PROMPT_CHOICE_S):
                    choosing = self._choose_for_prompt(asked, frozenset())
                    prompt = await stack.enter_async_context(choosing)
                knows_more = choice.new_chunks < prompt.new_chunks
                kv_peer = choice.kv_address if knows_more else prompt.kv_peer
                reply = await self._client.send(self._request(incoming, prompt.url, kv_peer, True))
                reply.raise_for_status()
        except (ServerUnavailable, httpx.HTTPError, TimeoutError) as error:
            reason = str(error) or "there is no prompt replica"
            _log.warning("a prompt is computed by the replica that answers: %s", reason)
            return choice.kv_peer
        return prompt.kv_address

    async def _forward(
        self,
        choice: Choice,
        incoming: Incoming,
        kv_peer: str,
        exchange: Exchange,
        *,
        can_retry: bool,
    ) -> None:
        """Raises httpx.HTTPError; with can_retry, also if the replica is ending."""
        request = self._request(incoming, choice.url, kv_peer)
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE and can_retry:
                raise httpx.HTTPStatusError(ENDED, request=request, response=response)
            if request_id := response.headers.get("x-request-id"):
                self._remember(request_id, choice)
            await exchange.start(choice.replica, response)
            async for piece in response.aiter_raw():
                await exchange.write(piece)
            await exchange.end()
        finally:
            await response.aclose()

    def _total(self, path: str, answers: Sequence[tuple[str, bytes]]) -> Response:
        if path == "/metrics":
            return Response(merged_metrics(answers), headers={"Content-Type": CONTENT_TYPE})
        total = merged_ps(answers) if path == PS_PATH else merged_stats(answers)
        return Response(encode_json(total), media_type="application/json")

    async def _loads_response(self, scope: Scope) -> Response:
        try:
            sections = loads.read_sections(QueryParams(scope["query_string"]).get("include"))
            total = merged_loads(await self._ask_all(loads.PATH))
        except LocalgenError as error:
            return error_response(scope["path"], error.code, error.message, error.param)
        return Response(
            encode_json(loads.loads_body(total, sections)), media_type="application/json"
        )

    def _request(
        self, incoming: Incoming, url: str, kv_peer: str, prompt_only: bool = False
    ) -> httpx.Request:
        """The request to a replica's server."""
        target = httpx.URL(url).copy_with(raw_path=incoming.raw_path)
        headers = incoming.headers(keeps_keys=self._replica_key is None)
        if self._replica_key is not None:
            headers.append((b"authorization", f"Bearer {self._replica_key}".encode()))
        if self._secret is not None:
            headers += gateway_headers(self._secret, incoming, kv_peer, prompt_only)
        return self._client.build_request(
            incoming.scope["method"], target, headers=headers, content=incoming.body
        )

    def _model_name(self, fields: Mapping[str, Any]) -> str:
        """The name of the model, empty for the one that all replicas have."""
        name = fields.get("model")
        # Ollama's clients add it
        name = name.removesuffix(":latest") if isinstance(name, str) else ""
        return "" if name in self._default_names else name

    def _owner(self, path: str, fields: Mapping[str, Any]) -> Choice | None:
        """The replica that answered what the request is about, or None."""
        named = _OWN_ID.match(path)
        request_id = named[1] if named else fields.get("previous_response_id")
        if not isinstance(request_id, str):
            return None
        return self._replica_by_request.get(request_id.removeprefix("resp_"))

    def _remember(self, request_id: str, choice: Choice) -> None:
        self._replica_by_request[request_id] = Choice(choice.replica, choice.url)
        while len(self._replica_by_request) > _MAX_REQUESTS:
            self._replica_by_request.popitem(last=False)


def _has_long_prompt(choice: Choice, incoming: Incoming) -> bool:
    """True if another replica could compute much of the prompt.

    They have the model that all have, and earlier answers are in one replica.
    """
    return (
        incoming.path in _GENERATING_PATHS
        and choice.new_chunks >= MIN_PROMPT_CHUNKS
        and not incoming.asked.model
        and (incoming.fields or {}).get("previous_response_id") is None
    )


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return b"".join(parts)
