"""Server startup: single-instance lock, Unix socket, log file.

Startup is ordered for latency: the socket listens, and a spare engine process starts, before any
heavy import. Keep the imports of this module light.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import IO

from localgen.backends.engine_stats import SAVE_TIMEOUT_S
from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.backends.terminal_text import one_line
from localgen.config import ServerSettings
from localgen.server.http.access import AccessPolicy, host_and_port, open_tcp_socket
from localgen.server.log_file import LogFile
from localgen.server.models.engine_process import (
    LLAMACPP_ENGINE,
    EngineCommand,
    EngineProcess,
)
from localgen.server.stats.request_log import create_log_formatter

MAX_LOG_BYTES = 4 << 20
EXIT_FAILED = 1
# a server that shuts down may hold the lock this much longer than its socket
_LOCK_TIMEOUT_S = SAVE_TIMEOUT_S + 15.0
_BACKLOG = 128
_log = logging.getLogger("localgen.server")


def main() -> int:
    """Run the background server: logs to a file, exits when idle. Returns the exit status."""
    try:
        settings = ServerSettings.from_environment()
        settings.create_dirs()
        log_to_file(settings)
        run_server(settings, idle_exit=True)
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if not error.filename:
            raise
        print(f"error: {one_line(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def run_server(
    settings: ServerSettings,
    access: AccessPolicy = AccessPolicy(),
    *,
    idle_exit: bool,
    engine_command: EngineCommand = LLAMACPP_ENGINE,
    model: str | None = None,
    load_options: LoadOptions = LoadOptions(),
) -> None:
    """Serve until a signal, a shutdown request or, with idle_exit, the idle timeout.

    model: loaded at startup; if that fails, the server exits and the error is raised.
    load_options: for this model, else for every model, unless a request says otherwise.

    Raises ServerUnavailable if a server is already running; BadSetting if access is insecure or
    its port cannot be bound.
    """
    access.validate()
    settings.create_dirs()
    with (
        _server_lock(settings),
        _listening_socket(settings) as sock,
        contextlib.ExitStack() as stack,
    ):
        sockets = [sock]
        if access.port is not None:
            sockets.append(stack.enter_context(open_tcp_socket(access)))
            host, port = sockets[-1].getsockname()[:2]
            _log.info("listening on http://%s", host_and_port(host, port))
        if access.stabilize:
            _log.info("prompts are stabilized: attribution headers, dates, order of tools")
        spare = EngineProcess.start(engine_command)
        from localgen.server.serving import serve

        # disabled by __main__; what was imported never becomes garbage
        gc.freeze()
        gc.enable()
        _log.info("server %d listens on %s", os.getpid(), settings.socket_path)
        serve(
            settings,
            access,
            sockets,
            idle_exit=idle_exit,
            engine_command=engine_command,
            spare=spare,
            model=model,
            load_options=load_options,
        )
        _log.info("server %d exits", os.getpid())


def log_to_file(settings: ServerSettings) -> None:
    """Log to the state folder; keep one rotated file."""
    handler = LogFile(settings.log_path, MAX_LOG_BYTES)
    handler.setFormatter(create_log_formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # standard error is the same file: what would go there unformatted is logged
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(
        failed.exc_type, failed.exc_value, failed.exc_traceback
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if not issubclass(kind, SystemExit):
        _log.critical("uncaught error", exc_info=(kind, error or kind(), trace))


@contextlib.contextmanager
def _server_lock(settings: ServerSettings) -> Iterator[None]:
    """Hold the lock that ensures a single server per user."""
    with open(settings.server_lock_path, "a+") as lock:
        os.fchmod(lock.fileno(), 0o600)
        _acquire_lock(lock, settings)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _acquire_lock(lock: IO[str], settings: ServerSettings) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip()
        if settings.is_server_listening():
            raise ServerUnavailable(
                f"A server is already running (pid {owner}); stop it with `localgen stop`"
            )
        if time.monotonic() > deadline:
            raise ServerUnavailable(f"the previous server (process {owner}) does not exit: kill it")
        time.sleep(0.02)


@contextlib.contextmanager
def _listening_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """Bind the Unix socket with mode 0600. Call under the lock: an existing file is stale."""
    path = settings.socket_path
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise ServerUnavailable(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    sock.listen(_BACKLOG)
    try:
        yield sock
    finally:
        path.unlink(missing_ok=True)
        sock.close()
