"""Start the local server, once even if several clients start at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from localgen.backends.engine_stats import SAVE_TIMEOUT_S
from localgen.backends.errors import ServerUnavailable
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment

SERVER_COMMAND = tuple(python_command("localgen.server"))
_START_TIMEOUT_S = 30.0
_SHUTDOWN_TIMEOUT_S = SAVE_TIMEOUT_S + 20.0
_POLL_INTERVAL_S = 0.01
# with less free space, a server cannot write why it ends
_LOG_LINE_BYTES = 4096
Predicate = Callable[[], bool]


class ServerKilled(ServerUnavailable):
    """A signal ended the server while it started."""


class LaunchedServer:
    """A server process that outlives the client and does not answer yet."""

    def __init__(self, settings: ServerSettings, command: Sequence[str]) -> None:
        self._settings = settings
        environment = python_environment() | settings.to_environment()
        # the client's default, not that of other clients
        environment.pop("LOCALGEN_MODEL", None)
        log_path = settings.log_path
        self._log_bytes = log_path.stat().st_size if log_path.exists() else 0
        with open(log_path, "ab") as log:
            os.fchmod(log.fileno(), 0o600)
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=environment,
            )

    def wait(self, is_ready: Predicate, is_aborted: Predicate) -> None:
        """Wait until the server answers.

        Raises ServerUnavailable with the reason if it does not (ServerKilled: a signal ended it),
        or if the client is aborted; then the server keeps running.
        """
        if not _wait_until(lambda: self._is_there(is_ready), _START_TIMEOUT_S, is_aborted):
            self._process.kill()
            raise ServerUnavailable(
                f"the server did not answer within {_START_TIMEOUT_S:.0f} s: "
                f"see {self._settings.log_path}"
            )

    def _is_there(self, is_ready: Predicate) -> bool:
        process = self._process
        has_ended = process.poll() is not None
        if is_ready():  # it may have exited because another server was faster
            return True
        if process.returncode is not None and process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            raise ServerKilled(
                f"the server was killed by {name} while it started: see {self._settings.log_path}"
            )
        if has_ended:
            reason = _failure_reason(self._settings, self._log_bytes)
            raise ServerUnavailable(f"the server did not start: {reason}")
        return False


@dataclass(frozen=True, slots=True)
class EarlyLaunch:
    """A server launched before its client exists. lock: the start lock, held until it answers."""

    server: LaunchedServer
    lock: IO[str]


def launch_early(
    settings: ServerSettings, command: Sequence[str] = SERVER_COMMAND
) -> EarlyLaunch | None:
    """Launch a server, so that it starts while the client is imported.

    None if one runs or is being started. Call it shortly before LocalClient.connect().
    """
    settings.create_dirs()
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(settings.start_lock_path, "a"))
        os.fchmod(lock.fileno(), 0o600)
        if not _try_lock(lock.fileno()) or settings.is_server_listening():
            return None
        server = LaunchedServer(settings, command)
        stack.pop_all()
    return EarlyLaunch(server, lock)


@contextlib.contextmanager
def start_lock(settings: ServerSettings, is_aborted: Predicate) -> Iterator[None]:
    """Hold the lock for starting a server; other clients wait, then find the server running."""
    with open(settings.start_lock_path, "a") as lock:
        os.fchmod(lock.fileno(), 0o600)
        if not _wait_until(lambda: _try_lock(lock.fileno()), _START_TIMEOUT_S, is_aborted):
            raise ServerUnavailable("another client has been starting the server for too long")
        yield


def is_being_started(settings: ServerSettings) -> bool:
    """True if a client holds the lock for starting a server."""
    with open(settings.start_lock_path, "a") as lock:
        return not _try_lock(lock.fileno())


def read_server_pid(settings: ServerSettings) -> int | None:
    """Process id of the server that holds its lock; None if none does."""
    try:
        with open(settings.server_lock_path, "r+") as lock:
            owner = lock.read(32).strip()
            return int(owner) if owner.isdecimal() and not _try_lock(lock.fileno()) else None
    except OSError:
        return None


def wait_for_shutdown(settings: ServerSettings, is_aborted: Predicate) -> bool:
    """Wait until no server holds its lock; False after _SHUTDOWN_TIMEOUT_S."""

    def has_ended() -> bool:
        with open(settings.server_lock_path, "a") as lock:
            return _try_lock(lock.fileno())

    return _wait_until(has_ended, _SHUTDOWN_TIMEOUT_S, is_aborted)


def _wait_until(predicate: Predicate, timeout_s: float, is_aborted: Predicate) -> bool:
    """Wait for a condition; False after the timeout. Raises ServerUnavailable on abort."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_true = predicate()
        if is_aborted():  # an aborted client cannot see the server, so is_true means nothing
            raise ServerUnavailable("stopped while the server was starting")
        if is_true or time.monotonic() > deadline:
            return is_true
        time.sleep(_POLL_INTERVAL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _failure_reason(settings: ServerSettings, offset: int) -> str:
    """A full disk, or the last line that the server logged after `offset`, without `error: `."""
    with open(settings.log_path, "rb") as log:
        # a log that has reached its size continues in a new file
        log.seek(offset if os.fstat(log.fileno()).st_size >= offset else 0)
        lines = log.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    for folder in (settings.runtime_dir, settings.state_dir):
        if shutil.disk_usage(folder).free < _LOG_LINE_BYTES:
            return f"no space left on the device of {folder}"
    reason = last.strip().removeprefix("error: ")
    return reason or f"it exited without a message, see {settings.log_path}"
