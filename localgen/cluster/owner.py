"""`python -m localgen.cluster.owner`: starts a cluster's head, and another if that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.running import HEAD, READY, REPLICA_DIRS, START, hold_lock
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment
from localgen.server.stats.request_log import create_log_formatter

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
# in a row, of a cluster that has run
_MAX_FAILED_STARTS = 3
_log = logging.getLogger("localgen.cluster")


def main() -> int:
    """Own a cluster until a signal. Argument: its ClusterConfig as JSON.

    Prints `ready` when all replicas are up. Returns the exit status of the last head.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(create_log_formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _adopt_orphans()
    settings = ServerSettings.from_environment()
    try:
        with hold_lock(settings):
            status = Owner(sys.argv[1]).run()
            for folder in settings.runtime_dir.glob(REPLICA_DIRS):  # Ray does not wait for actors
                shutil.rmtree(folder, ignore_errors=True)
            return status
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return 1


class Owner:
    """config: of the cluster, as JSON.

    While one head runs, the next one has imported Ray, which takes seconds, and waits.
    """

    def __init__(self, config: str) -> None:
        self._config = config
        self._head: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def run(self) -> int:
        """Run heads until one ends by itself, the first one or several in a row do not start, or a
        signal comes."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        try:
            return self._run_heads()
        finally:
            _kill_children()

    def _run_heads(self) -> int:
        was_ready, num_failed = False, 0
        standby = self._open()
        while True:
            head = self._head = standby if standby.poll() is None else self._open()
            if self._is_ending:  # the signal came before there was a head to tell
                head.terminate()
            if _start(head):
                if not was_ready:
                    print(READY, flush=True)
                was_ready, num_failed = True, 0
                standby = self._open()
                status = _wait(head, standby)
                if status == 0:
                    return status
            else:
                status, num_failed = head.wait(), num_failed + 1
            if self._is_ending or not was_ready or num_failed == _MAX_FAILED_STARTS:
                return status
            _kill_children(besides=standby)
            _log.error("the cluster's head ended with status %d: the next one starts", status)

    def _open(self) -> subprocess.Popen[bytes]:
        """A head that waits for START."""
        return subprocess.Popen(
            python_command(HEAD, self._config),
            stdin=subprocess.PIPE,  # ends with this process
            stdout=subprocess.PIPE,
            env=python_environment(),
        )

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        if self._head is not None:
            self._head.send_signal(number)


def _start(head: subprocess.Popen[bytes]) -> bool:
    """Start a cluster, and wait. Returns False if the head ends before the cluster is ready."""
    assert head.stdin is not None
    assert head.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        head.stdin.write(START)
        head.stdin.flush()
    return READY in (line.decode().strip() for line in head.stdout)


def _wait(head: subprocess.Popen[bytes], standby: subprocess.Popen[bytes]) -> int:
    """Wait for a head, and reap orphans meanwhile. Returns its exit status."""
    while sys.platform == "linux" and head.poll() is None:
        standby.poll()
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid not in (head.pid, standby.pid):
            os.waitpid(ended.si_pid, 0)
    return head.wait()


def _adopt_orphans() -> None:
    """Become the parent of what a head leaves behind, as Ray's processes outlive it; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_children(besides: subprocess.Popen[bytes] | None = None) -> None:
    """Kill what a head has left, and what that starts meanwhile."""
    kept = besides.pid if besides else None
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while left := [each for each in psutil.Process().children(recursive=True) if each.pid != kept]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            _log.error("%d processes of the last head cannot be killed", len(left))
            return


if __name__ == "__main__":
    sys.exit(main())
