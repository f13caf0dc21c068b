"""Run the application in uvicorn: idle timeout, graceful shutdown, connection limits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import signal
import socket
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from localgen.backends.errors import ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.config import ServerSettings
from localgen.server import serving
from localgen.server.app import create_app
from localgen.server.http.access import AccessPolicy, open_tcp_socket
from localgen.server.http.errors import error_response
from localgen.server.http.unchunked import send_unchunked
from localgen.server.models.engine_process import EngineCommand, EngineProcess
from localgen.server.models.engine_watch import EngineWatch
from localgen.server.models.manager import ModelManager
from localgen.server.models.serve_options import ServeOptions
from localgen.server.preload import Preload
from localgen.server.requests.caller import LOCAL_CLIENT
from localgen.server.stats.server_state import ServerState

if TYPE_CHECKING:
    from localgen.server.stats.trace_recorder import TraceRecorder

# the usual soft limit, 256 or 1,024, is too low for a server
_TARGET_OPEN_FILES = 8192
# how long running requests may continue after shutdown begins
DRAIN_TIMEOUT_S = 5.0
# after that, time for error events to reach their clients
_FLUSH_TIMEOUT_S = 2
# even with a keep-alive of 0, the server waits for the request of the client that started it
_MIN_IDLE_S = 1.0
_WATCH_PERIOD_S = 0.25
# deadline for request headers; uvicorn closes connections that are idle after a response
HEADER_TIMEOUT_S = 10.0
# a client that stops reading for this long is disconnected: it would hold its model
STALL_TIMEOUT_S = 60.0
MAX_HEADER_BYTES = 64 << 10
# a client that is refused may still send for this long, and then read the answer
_LINGER_S = 1.0
# given to the parser at once
_PARSED_BYTES = 4 << 10
# without free file descriptors, asyncio tries to accept this many connections, and logs each
_BACKLOG = 128
_log = logging.getLogger("localgen.server")


def max_open_files() -> int:
    """Return the soft limit of open file descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_file_limit() -> None:
    """Raise the soft limit towards _TARGET_OPEN_FILES, at most to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _TARGET_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_TARGET_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    settings: ServerSettings,
    access: AccessPolicy,
    sockets: list[socket.socket],
    *,
    idle_exit: bool,
    engine_command: EngineCommand,
    spare: EngineProcess | None,
    model: str | None = None,
    load_options: LoadOptions = LoadOptions(),
) -> None:
    """Serve on listening sockets until shutdown. All engine processes have ended on return.

    model: loaded at startup; if that fails, the server shuts down and the error is raised.
    load_options: for this model, else for every model.
    """
    serving.raise_open_file_limit()
    # uvicorn re-raises the signals it caught when it is done; ignore them then
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    manager = ModelManager(settings, engine_command=engine_command, spare=spare)
    manager.serve_options = ServeOptions(load=load_options, model=model)
    server = _UvicornServer(settings, access, manager)
    engine_watch = EngineWatch(lambda: manager.residents, settings.hang_timeout_s)
    asyncio.run(_serve(server, manager, sockets, engine_watch, idle_exit))
    server.preload.raise_if_failed()


async def _serve(
    server: _UvicornServer,
    manager: ModelManager,
    sockets: list[socket.socket],
    engine_watch: EngineWatch,
    idle_exit: bool,
) -> None:
    watches = [
        asyncio.create_task(server.watch_idle(idle_exit)),
        asyncio.create_task(engine_watch.run()),
    ]
    server.preload.start()
    try:
        await server.serve(sockets=sockets)
    finally:
        for watch in watches:
            watch.cancel()
        await manager.close()


def _trace_recorder(settings: ServerSettings) -> TraceRecorder | None:
    if settings.record_trace is None:
        return None
    # not imported without it: numpy takes a tenth of a second
    from localgen.server.stats.trace_recorder import TraceRecorder

    return TraceRecorder(settings.record_trace, settings)


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """How an application is served, with the limits on connections of _HttpConnection."""
    return uvicorn.Config(
        app,
        http=_HttpConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # do not trust X-Forwarded-For: a client could claim to be `local`
        proxy_headers=False,
        timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
        backlog=_BACKLOG,
    )


class _UvicornServer(uvicorn.Server):
    def __init__(
        self,
        settings: ServerSettings,
        access: AccessPolicy,
        manager: ModelManager,
    ) -> None:
        options = manager.serve_options
        self.preload = Preload(manager, options, self._request_shutdown, settings)
        app = create_app(
            manager,
            ServerState(settings, manager, is_preloading=lambda: self.preload.is_pending),
            access,
            trace=_trace_recorder(settings),
            listen=self._listen,
            request_shutdown=self._request_shutdown,
            is_shutting_down=lambda: self.should_exit,
        )
        super().__init__(uvicorn_config(app))
        self._settings = settings
        self._manager = manager

    async def watch_idle(self, idle_exit: bool) -> None:
        """Unload expired models; with idle_exit, shut down after keep_alive_s without requests."""
        keep_alive_s = self._settings.keep_alive_s
        while not self.should_exit:
            await asyncio.sleep(_WATCH_PERIOD_S)
            await self._manager.unload_expired()
            if not idle_exit or keep_alive_s is None or self._manager.residents:
                continue
            if self._manager.idle_s >= max(keep_alive_s, _MIN_IDLE_S):
                _log.info("idle for %.0f s", self._manager.idle_s)
                self._request_shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish within DRAIN_TIMEOUT_S, then fail the rest.

        The socket is removed first, so that new clients start another server.
        """
        self._settings.socket_path.unlink(missing_ok=True)
        self._manager.refuse_new_requests()
        self.preload.cancel()
        if running := self._manager.active_requests:
            requests = "1 request" if running == 1 else f"{running} requests"
            _log.info("shutting down: waiting up to %.0f s for %s", DRAIN_TIMEOUT_S, requests)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._manager.active_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._manager.fail_all(ServerUnavailable.code, "the server is shutting down: try again")
        await super().shutdown(sockets)

    async def _listen(self) -> _Listener:
        """Listen on a free loopback port."""

        def connect() -> _HttpConnection:
            return _HttpConnection(self.config, self.server_state, {})

        sock = open_tcp_socket(AccessPolicy(port=0))
        server = await asyncio.get_running_loop().create_server(connect, sock=sock)
        self.servers.append(server)  # closed at shutdown
        return _Listener(server, self.servers)

    def _request_shutdown(self) -> None:
        self._manager.refuse_new_requests()
        self.should_exit = True


@dataclass(frozen=True, slots=True)
class _Listener:
    """A listening server. servers: all of the application."""

    server: asyncio.Server
    servers: list[asyncio.Server]

    @property
    def port(self) -> int:
        return int(self.server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self.server.close()
        if self.server in self.servers:
            self.servers.remove(self.server)


class _HttpConnection(HttpToolsProtocol):
    """A connection with limits on header size, header time, pipelining and stalled reads.

    What a client sends behind a running answer stays unparsed until that answer ends: at most
    MAX_HEADER_BYTES and what one read returns, then reading pauses. So the limits on headers hold
    for every request, when its turn comes. Connections on the Unix socket get a numbered client
    name, for fair queueing.
    """

    _connection_ids = itertools.count(1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._is_refused = False  # what follows is read: closing before resets the connection
        self._pipelined = bytearray()
        self._cycles: list[RequestResponseCycle] = []
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._start_header_timer()
        if not self.client:
            self.client = (LOCAL_CLIENT, next(self._connection_ids))
        elif len(self.connections) > serving.max_open_files() // 2:
            # the other half is for local clients, engine pipes and files
            transport.abort()

    def _start_header_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    @property
    def _is_idle(self) -> bool:
        """True before the first request, and after each response."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """True while the next bytes belong to a later request than the one that runs."""
        # self.cycle is the newest request; the queue has those that wait behind a running one
        return bool(self.pipeline) or not (self._is_idle or self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        # in pieces, so that a read of many small requests starts only a few of them
        for begin in range(0, len(data), _PARSED_BYTES):
            if self.transport.is_closing() or self._is_refused:
                return
            if self._is_answering:
                self._hold(data[begin:])
                return
            self._parse(data[begin : begin + _PARSED_BYTES])

    def _parse(self, piece: bytes) -> None:
        if self._is_idle and self._header_timer is None:
            self._start_header_timer()  # next request begins
        # headers, trailers and chunk sizes: all that is not a body
        self._header_bytes += len(piece)
        super().data_received(piece)
        if self._header_bytes <= MAX_HEADER_BYTES or self.transport.is_closing():
            return
        if self._is_idle:
            self._refuse_headers()
        else:  # an answer has begun
            self.transport.abort()

    def _refuse_headers(self) -> None:
        message = f"the headers exceed {MAX_HEADER_BYTES:,} bytes: shorten them"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. msg: of uvicorn."""
        message = "this is not an HTTP request that can be parsed: check its first line and headers"
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_request", message)

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer without the application; close once the client has had time to read it."""
        body = error_response("", code, message, status=status).body
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._is_refused = True
        self.transport.write(head.encode() + bytes(body))
        asyncio.get_running_loop().call_later(_LINGER_S, self.transport.close)

    def _hold(self, data: bytes) -> None:
        self._pipelined += data
        if len(self._pipelined) > MAX_HEADER_BYTES:
            # not self.flow: the running request resumes it
            self.transport.pause_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._pipelined and not self.transport.is_closing():
            held, self._pipelined = bytes(self._pipelined), bytearray()
            self.transport.resume_reading()
            self.data_received(held)

    def on_header(self, name: bytes, value: bytes) -> None:
        is_trailer = self.cycle is not None and self.cycle.scope is self.scope
        if not is_trailer:  # the headers of this request are checked already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            send_unchunked(self.cycle)
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._is_idle:
            self._header_bytes = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.client and self.client[0] != LOCAL_CLIENT:
            self._stall_timer = asyncio.get_running_loop().call_later(
                STALL_TIMEOUT_S, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for cycle in self._cycles:  # uvicorn tells the newest only, which may not have begun
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
