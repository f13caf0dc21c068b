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
from localgen.interpreter import python_command, python_environment

SERVER_COMMAND = tuple(python_command("localgen.server"))
_START_S = 30.0
_END_S = 20.0
_POLL_S = 0.01


def start_server(settings: Settings, command: Sequence[str], answers: Callable[[], bool]) -> None:
    """Start a server and wait until it answers. ServerUnavailable: with the reason it gave."""
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
    deadline = time.monotonic() + _START_S
    while not answers():
        if process.poll() is not None:
            raise ServerUnavailable(f"the server did not start: {_reason(settings, log_bytes)}")
        if time.monotonic() > deadline:
            process.kill()
            raise ServerUnavailable(
                f"the server did not answer within {_START_S:.0f} s: see {settings.log_path}"
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def start_lock(settings: Settings) -> Iterator[None]:
    """Hold the lock under which servers are started; others wait, then find ours."""
    with open(settings.start_lock_path, "a") as lock:
        os.fchmod(lock.fileno(), 0o600)
        deadline = time.monotonic() + _START_S
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise ServerUnavailable("another client has been starting the server for too long")
            time.sleep(_POLL_S)
        yield


def wait_for_end(settings: Settings) -> bool:
    """Wait until no server holds its lock; False if one still does after a while."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        with open(settings.server_lock_path, "a") as lock:
            if _try_lock(lock.fileno()):
                return True
        time.sleep(_POLL_S)
    return False


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
