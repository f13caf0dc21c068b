"""Starting a server that outlives the client, once however many clients start at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from localgen.backends.errors import ServerUnavailable
from localgen.config import Settings
from localgen.machine.python_process import python_command, python_environment

SERVER_COMMAND = tuple(python_command("localgen.server"))
_START_S = 30.0
_END_S = 20.0
_POLL_S = 0.01
Asked = Callable[[], bool]


def start_server(settings: Settings, command: Sequence[str], answers: Asked, is_cut: Asked) -> None:
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
            env=python_environment() | settings.environment(),
        )

    def is_there() -> bool:
        has_ended = process.poll() is not None
        if answers():  # it may have ended because another one was faster
            return True
        if has_ended:
            raise ServerUnavailable(f"the server did not start: {_reason(settings, log_bytes)}")
        return False

    if not _wait(is_there, _START_S, is_cut):
        process.kill()
        raise ServerUnavailable(
            f"the server did not answer within {_START_S:.0f} s: see {settings.log_path}"
        )


@contextlib.contextmanager
def start_lock(settings: Settings, is_cut: Asked) -> Iterator[None]:
    """Hold the lock under which servers are started; others wait, then find ours."""
    with open(settings.start_lock_path, "a") as lock:
        os.fchmod(lock.fileno(), 0o600)
        if not _wait(lambda: _try_lock(lock.fileno()), _START_S, is_cut):
            raise ServerUnavailable("another client has been starting the server for too long")
        yield


def wait_for_end(settings: Settings, is_cut: Asked) -> bool:
    """Wait until no server holds its lock; False if one still does after a while."""

    def has_ended() -> bool:
        with open(settings.server_lock_path, "a") as lock:
            return _try_lock(lock.fileno())

    return _wait(has_ended, _END_S, is_cut)


def _wait(until: Asked, limit_s: float, is_cut: Asked) -> bool:
    """Wait until it is so; False: it was not in time. ServerUnavailable: nobody waits any more."""
    deadline = time.monotonic() + limit_s
    while True:
        is_so = until()
        if is_cut():  # what a client that was cut sees means nothing
            raise ServerUnavailable("stopped while the server was started")
        if is_so or time.monotonic() > deadline:
            return is_so
        time.sleep(_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _reason(settings: Settings, skip_bytes: int) -> str:
    """The last line that a server wrote before it ended."""
    with open(settings.log_path, "rb") as log:
        log.seek(skip_bytes)
        lines = log.read().decode(errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return said.removeprefix("error: ") or f"it left without a word, see {settings.log_path}"
