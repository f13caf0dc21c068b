"""uvicorn around the application, and what happens while it runs and when it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import signal
import socket
import time

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from localgen.backends.errors import ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.config import ServerSettings
from localgen.server import serving
from localgen.server.app import create_app
from localgen.server.http.access import AccessPolicy
from localgen.server.models.engine_process import EngineCommand, EngineProcess
from localgen.server.models.manager import ModelManager
from localgen.server.models.preload import Preload
from localgen.server.requests.caller import LOCAL_CLIENT
from localgen.server.stats.server_state import ServerState

# what systems give by default, 256 or 1,024, is for programs that serve nobody
_TARGET_OPEN_FILES = 8192
# running answers may go on this long once the server was told to leave
DRAIN_TIMEOUT_S = 5.0
# time for error events to reach their clients after that
_FLUSH_TIMEOUT_S = 2
# a server that unloads at once must still live until its first client has asked
_MIN_IDLE_S = 1.0
_WATCH_PERIOD_S = 0.25
# a connection's first headers have to be there by then; uvicorn ends those idle after a request
HEADER_TIMEOUT_S = 10.0
# a client that reads nothing for so long holds a model for nobody
STALL_TIMEOUT_S = 60.0
MAX_HEADER_BYTES = 64 << 10
_log = logging.getLogger("localgen.server")


def max_open_files() -> int:
    """Most that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_file_limit() -> None:
    """Take as many as are wanted, if the system lets us."""
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
) -> None:
    """Answer on listening sockets until told to leave; all engines have ended then.

    model: loaded at once; what prevents that ends the server and is raised.
    """
    serving.raise_open_file_limit()
    # uvicorn raises the signals it caught once more when it is done: by then all is in order
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    manager = ModelManager(settings, engine_command=engine_command, spare=spare)
    server = _UvicornServer(settings, access, manager, model)
    asyncio.run(_serve(server, manager, sockets, idle_exit))
    server.preload.raise_if_failed()


async def _serve(
    server: _UvicornServer, manager: ModelManager, sockets: list[socket.socket], idle_exit: bool
) -> None:
    watch = asyncio.create_task(server.watch_idle(idle_exit))
    server.preload.start()
    try:
        await server.serve(sockets=sockets)
    finally:
        watch.cancel()
        await manager.close()


class _UvicornServer(uvicorn.Server):
    def __init__(
        self,
        settings: ServerSettings,
        access: AccessPolicy,
        manager: ModelManager,
        model: str | None,
    ) -> None:
        asked = LoadOptions(draft=settings.draft)
        self.preload = Preload(manager, model, self._request_shutdown, asked)
        app = create_app(
            manager,
            ServerState(settings, manager, is_preloading=lambda: self.preload.is_pending),
            access,
            request_shutdown=self._request_shutdown,
            is_shutting_down=lambda: self.should_exit,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=_HttpConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # who asks is whoever connected: a header that names another client would open the
                # door to anybody who writes `local` into it
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
            )
        )
        self._settings = settings
        self._manager = manager

    async def watch_idle(self, idle_exit: bool) -> None:
        """Unload idle models; leave when none is left and nothing was asked for long enough."""
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
        """Let running answers end, then tell the rest; new clients start another server."""
        self._settings.socket_path.unlink(missing_ok=True)
        self._manager.refuse_new_requests()
        self.preload.cancel()
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._manager.active_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._manager.fail_all(ServerUnavailable.code, "the server was told to end: try again")
        await super().shutdown(sockets)

    def _request_shutdown(self) -> None:
        self._manager.refuse_new_requests()
        self.should_exit = True


class _HttpConnection(HttpToolsProtocol):
    """A connection whose client has a name, even on a Unix socket, for fair queueing; whose
    headers come in good time and are not endless; and whose client reads what it asked for."""

    _connection_ids = itertools.count(1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._header_timer = self._start_header_timer()
        self._stall_timer: asyncio.TimerHandle | None = None
        if not self.client:
            self.client = (LOCAL_CLIENT, next(self._connection_ids))
        elif len(self.connections) > serving.max_open_files() // 2:
            # the rest is for clients on this machine, engines and files
            transport.abort()

    def _start_header_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            if self.cycle is not None and not self._header_bytes:
                self._header_timer = self._start_header_timer()  # another request begins
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._header_timer.cancel()
        super().on_headers_complete()

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
        self._header_timer.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)
