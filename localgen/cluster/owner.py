"""`python -m localgen.cluster.owner`: starts a cluster's head, and again if that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from types import FrameType

import psutil

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.running import READY, REPLICA_DIRS, hold_lock
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment
from localgen.server.stats.request_log import create_log_formatter

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# for processes that notice the end of the head by themselves
_GRACE_S = 1.0
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
    """config: of the cluster, as JSON."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._head: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def run(self) -> int:
        """Run heads until one ends by itself, does not start, or a signal comes."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        was_ready = False
        while True:
            self._head = self._start()
            if self._is_ending:  # the signal came before there was a head to tell
                self._head.terminate()
            assert self._head.stdout is not None
            is_ready = READY in (line.decode().strip() for line in self._head.stdout)
            if is_ready and not was_ready:
                print(READY, flush=True)
                was_ready = True
            status = self._head.wait()
            _end_children()
            if self._is_ending or status == 0 or not is_ready:
                return status
            _log.error("the cluster's head ended with status %d: it is started again", status)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            python_command("localgen.cluster.head", self._config),
            stdin=subprocess.PIPE,  # ends with this process
            stdout=subprocess.PIPE,
            env=python_environment(),
        )

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        if self._head is not None:
            self._head.terminate()


def _adopt_orphans() -> None:
    """Become the parent of what a head leaves behind, as Ray's processes outlive it; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """End what a head has left behind."""
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
