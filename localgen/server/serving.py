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
from localgen.config import Settings
from localgen.server import serving
from localgen.server.app import create_app
from localgen.server.http.access import Access
from localgen.server.models.engine_process import EngineCommand, EngineProcess
from localgen.server.models.manager import ModelManager
from localgen.server.models.preload import Preload
from localgen.server.requests.caller import LOCAL
from localgen.server.stats.server_state import ServerState

# what systems give by default, 256 or 1,024, is for programs that serve nobody
_WANTED = 8192
# running answers may go on this long once the server was told to leave
DRAIN_S = 5.0
# time for error events to reach their clients after that
_FLUSH_S = 2
# a server that unloads at once must still live until its first client has asked
_LEAST_IDLE_S = 1.0
_TICK_S = 0.25
# a connection's first headers have to be there by then; uvicorn ends those idle after a request
HEADERS_S = 10.0
# a client that reads nothing for so long holds a model for nobody
STALL_S = 60.0
MAX_HEADER_BYTES = 64 << 10
_log = logging.getLogger("localgen.server")


def limit() -> int:
    """Most that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Take as many as are wanted, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    settings: Settings,
    access: Access,
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
    serving.raise_limit()
    # uvicorn raises the signals it caught once more when it is done: by then all is in order
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    manager = ModelManager(settings, engine_command=engine_command, spare=spare)
    server = _Server(settings, access, manager, model)
    asyncio.run(_serve(server, manager, sockets, idle_exit))
    server.preload.check()


async def _serve(
    server: _Server, manager: ModelManager, sockets: list[socket.socket], idle_exit: bool
) -> None:
    watch = asyncio.create_task(server.watch(idle_exit))
    server.preload.start()
    try:
        await server.serve(sockets=sockets)
    finally:
        watch.cancel()
        await manager.close()


class _Server(uvicorn.Server):
    def __init__(
        self, settings: Settings, access: Access, manager: ModelManager, model: str | None
    ) -> None:
        asked = LoadOptions(draft=settings.draft)
        self.preload = Preload(manager, model, self._leave, asked)
        app = create_app(
            manager,
            ServerState(settings, manager, starting=lambda: self.preload.pending),
            access,
            leave=self._leave,
            leaving=lambda: self.should_exit,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # who asks is whoever connected: a header that names another client would open the
                # door to anybody who writes `local` into it
                proxy_headers=False,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        self._settings = settings
        self._manager = manager

    async def watch(self, idle_exit: bool) -> None:
        """Unload idle models; leave when none is left and nothing was asked for long enough."""
        keep_alive_s = self._settings.keep_alive_s
        while not self.should_exit:
            await asyncio.sleep(_TICK_S)
            await self._manager.expire()
            if not idle_exit or keep_alive_s is None or self._manager.residents:
                continue
            if self._manager.idle_s >= max(keep_alive_s, _LEAST_IDLE_S):
                _log.info("idle for %.0f s", self._manager.idle_s)
                self._leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end, then tell the rest; new clients start another server."""
        self._settings.socket_path.unlink(missing_ok=True)
        self._manager.refuse_new()
        self.preload.cancel()
        deadline = time.monotonic() + DRAIN_S
        while self._manager.active_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._manager.fail_all(ServerUnavailable.code, "the server was told to end: try again")
        await super().shutdown(sockets)

    def _leave(self) -> None:
        self._manager.refuse_new()
        self.should_exit = True


class _Connection(HttpToolsProtocol):
    """A connection whose client has a name, even on a Unix socket, for fair queueing; whose
    headers come in good time and are not endless; and whose client reads what it asked for."""

    _numbers = itertools.count(1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._patience = self._hurry()
        self._stall: asyncio.TimerHandle | None = None
        if not self.client:
            self.client = (LOCAL, next(self._numbers))
        elif len(self.connections) > serving.limit() // 2:
            # the rest is for clients on this machine, engines and files
            transport.abort()

    def _hurry(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(HEADERS_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            if self.cycle is not None and not self._header_bytes:
                self._patience = self._hurry()  # another request begins
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._patience.cancel()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.client and self.client[0] != LOCAL:
            self._stall = asyncio.get_running_loop().call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)
