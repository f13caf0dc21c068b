"""The processes of the ranks beside the first, as rank 0 sees them.

Orders go over a socket to each, not through collectives: a rank that waits for its next step in a
collective keeps a GPU busy and runs into timeouts, and a socket tells at once that it has died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypeVar

import localgen
from localgen.backends.cuda.parallel.rank_model import WorkerError
from localgen.backends.errors import EngineDied, LocalgenError, error_from_code

_WORKER_MODULE = "localgen.backends.cuda.parallel.worker"
_Reply = TypeVar("_Reply")

# a rank that was told to leave does so within this time, or is killed
_SHUTDOWN_TIMEOUT_S = 3.0
# a rank that closed its socket has ended, or will in a moment
_EXIT_STATUS_TIMEOUT_S = 1.0
# the thread that computes learns of a loss by itself, unless it idles, or waits for a GPU that
# waits for the lost one
_NOTICE_TIMEOUT_S = 0.5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _WorkerProcess:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection[object, object]

    @classmethod
    def start(cls, rank: int) -> _WorkerProcess:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # closes with this process, whatever ends it
                env=_worker_environment(),
            )
        return cls(rank, process, ours)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def exit_message(self) -> str:
        """How it ended, in words; waits a moment for that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(_EXIT_STATUS_TIMEOUT_S)
            how = f"ended with status {status}"
            if status < 0:
                how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
            return f"{self.name} {how}"
        return f"{self.name} closed its socket"

    def close(self, timeout_s: float) -> None:
        """Wait for it to leave; end it if it does not."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class WorkerGroup:
    """Starts ranks 1 and up. A rank that is lost is an error of whatever is asked next.

    Once `exit_on_worker_loss` is called, losing one ends this process within a second, should
    nobody ask.
    """

    def __init__(self, tp_size: int) -> None:
        self._replies: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._failure: LocalgenError | None = None
        self._failure_found, self._failure_noticed = threading.Event(), threading.Event()
        self._exits_on_loss = self._closing = False
        self._workers = [_WorkerProcess.start(rank) for rank in range(1, tp_size)]
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def exit_on_worker_loss(self) -> None:
        """From now on this process cannot go on without them."""
        self._exits_on_loss = True

    def send_each(self, message_for_rank: Callable[[int], object]) -> None:
        """Send each what `message_for_rank` says for its rank."""
        try:
            for worker in self._workers:
                worker.connection.send(message_for_rank(worker.rank))
        except OSError as error:
            raise self.failure_cause(error) from None

    def broadcast(self, message: object) -> None:
        """Send all of them the same."""
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            for worker in self._workers:
                worker.connection.send_bytes(packed)
        except OSError as error:
            raise self.failure_cause(error) from None

    def gather_replies(self, reply_type: type[_Reply]) -> list[_Reply]:
        """What they answer, one each, in any order. LocalgenError: one cannot, or is lost."""
        found: list[_Reply] = []
        while len(found) < len(self._workers):
            reply = self._replies.get()
            if isinstance(reply, LocalgenError):
                self._failure_noticed.set()
                raise reply
            assert isinstance(reply, reply_type), reply
            found.append(reply)
        return found

    def failure_cause(self, error: Exception) -> LocalgenError:
        """Why something failed that needs all ranks: a rank is lost, if so; else the error."""
        self._failure_noticed.set()
        self._failure_found.wait(_EXIT_STATUS_TIMEOUT_S)
        return self._failure or EngineDied(f"rank 0: {str(error).splitlines()[0]}")

    def shut_down(self, message: object) -> None:
        """Tell them to leave; the last thing they are told."""
        self._closing = True
        with contextlib.suppress(LocalgenError):
            self.broadcast(message)

    def close(self) -> None:
        """End all of them; those that were not dismissed at once."""
        patience_s = _SHUTDOWN_TIMEOUT_S if self._closing else 0.0
        self._closing = True
        for worker in self._workers:
            worker.close(patience_s)
        self._listener.join()
        for worker in self._workers:
            worker.connection.close()

    def _listen(self) -> None:
        by_orders = {worker.connection: worker for worker in self._workers}
        while by_orders:
            for orders in wait(list(by_orders)):
                assert isinstance(orders, Connection)
                try:
                    heard = orders.recv()
                except (EOFError, OSError):
                    heard = None
                    worker = by_orders.pop(orders)
                    if not self._closing:
                        self._record_failure(EngineDied(worker.exit_message()))
                if isinstance(heard, WorkerError):
                    self._record_failure(error_from_code(heard.code, heard.message))
                elif heard is not None:
                    self._replies.put(heard)

    def _record_failure(self, error: LocalgenError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._failure_found.set()
        self._replies.put(error)
        if self._exits_on_loss and not self._failure_noticed.wait(_NOTICE_TIMEOUT_S):
            log.error("%s", error)
            os._exit(1)


def _worker_environment() -> dict[str, str]:
    """This environment, and localgen importable from where it was imported here."""
    root = str(Path(localgen.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, known] if known else [root])}
