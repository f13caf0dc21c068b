"""Starting a server that outlives the client, once however many clients start at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from localgen.backends.errors import ServerUnavailable
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment

SERVER_COMMAND = tuple(python_command("localgen.server"))
_START_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.01
Predicate = Callable[[], bool]


def start_server(
    settings: ServerSettings, command: Sequence[str], is_ready: Predicate, is_aborted: Predicate
) -> None:
    """Start a server and wait until it answers.

    ServerUnavailable: with the reason it gave; or nobody waits for it any more, and it goes on.
    """
    log_bytes = settings.log_path.stat().st_size if settings.log_path.exists() else 0
    with open(settings.log_path, "ab") as log:
        os.fchmod(log.fileno(), 0o600)
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=python_environment() | settings.to_environment(),
        )

    def is_there() -> bool:
        has_ended = process.poll() is not None
        if is_ready():  # it may have ended because another one was faster
            return True
        if has_ended:
            raise ServerUnavailable(
                f"the server did not start: {_last_log_line(settings, log_bytes)}"
            )
        return False

    if not _wait_until(is_there, _START_TIMEOUT_S, is_aborted):
        process.kill()
        raise ServerUnavailable(
            f"the server did not answer within {_START_TIMEOUT_S:.0f} s: see {settings.log_path}"
        )


@contextlib.contextmanager
def start_lock(settings: ServerSettings, is_aborted: Predicate) -> Iterator[None]:
    """Hold the lock under which servers are started; others wait, then find ours."""
    with open(settings.start_lock_path, "a") as lock:
        os.fchmod(lock.fileno(), 0o600)
        if not _wait_until(lambda: _try_lock(lock.fileno()), _START_TIMEOUT_S, is_aborted):
            raise ServerUnavailable("another client has been starting the server for too long")
        yield


def wait_for_shutdown(settings: ServerSettings, is_aborted: Predicate) -> bool:
    """Wait until no server holds its lock; False if one still does after a while."""

    def has_ended() -> bool:
        with open(settings.server_lock_path, "a") as lock:
            return _try_lock(lock.fileno())

    return _wait_until(has_ended, _SHUTDOWN_TIMEOUT_S, is_aborted)


def _wait_until(predicate: Predicate, timeout_s: float, is_aborted: Predicate) -> bool:
    """Wait until it is so; False: it was not in time. ServerUnavailable: nobody waits any more."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_so = predicate()
        if is_aborted():  # what a client that was cut sees means nothing
            raise ServerUnavailable("stopped while the server was started")
        if is_so or time.monotonic() > deadline:
            return is_so
        time.sleep(_POLL_INTERVAL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _last_log_line(settings: ServerSettings, offset: int) -> str:
    """The last line that a server wrote before it ended."""
    with open(settings.log_path, "rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return said.removeprefix("error: ") or f"it left without a word, see {settings.log_path}"
