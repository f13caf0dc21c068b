"""Rank 0's side of the worker processes: start, messages, failure detection, shutdown.

Messages go over one socket per worker, not through collectives: a rank that waits for its next step
in a collective keeps its GPU busy and runs into timeouts, and a socket reports its death at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import localgen
from localgen.backends.cuda.parallel.rank_model import WorkerError
from localgen.backends.errors import EngineDied, LocalgenError, error_from_code
from localgen.backends.messages import FrameSocket, start_process

_WORKER_MODULE = "localgen.backends.cuda.parallel.worker"
_Reply = TypeVar("_Reply")

# workers that do not exit within this time of ShutdownWorker are killed
_SHUTDOWN_TIMEOUT_S = 3.0
# a worker that closed its socket has exited or is about to
_EXIT_STATUS_TIMEOUT_S = 1.0
# the engine thread notices a lost worker itself, unless it is idle or waits for a GPU that in turn
# waits for the lost rank
_NOTICE_TIMEOUT_S = 0.5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _WorkerProcess:
    rank: int
    process: subprocess.Popen[bytes]
    messages: FrameSocket

    @classmethod
    def start(cls, rank: int) -> _WorkerProcess:
        return cls(
            rank,
            *start_process(
                [sys.executable, "-P", "-m", _WORKER_MODULE],
                stdin=subprocess.PIPE,  # closes when this process ends, even on a crash
                env=worker_environment(),
            ),
        )

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def exit_message(self) -> str:
        """Describe how the process ended, for an error message. Waits briefly for its status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(_EXIT_STATUS_TIMEOUT_S)
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
            return f"{self.name} {how}"
        return f"{self.name} closed its socket"

    def close(self, timeout_s: float) -> None:
        """Wait for the process to exit; kill it after timeout_s."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class WorkerGroup:
    """The worker processes of ranks 1 and up; the next call raises if a worker is lost.

    After `exit_on_worker_loss`, this process exits within a second of a loss if no call is made.
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
        """From now on, exit this process if a worker is lost and no call reports it."""
        self._exits_on_loss = True

    def send_each(self, message_for_rank: Callable[[int], object]) -> None:
        """Send `message_for_rank(rank)` to each worker. Raises LocalgenError if one is lost."""
        self._send(lambda rank: pickle.dumps(message_for_rank(rank)))

    def broadcast(self, message: object) -> None:
        """Send the same message to all workers. Raises LocalgenError if one is lost."""
        packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._send(lambda rank: packed)

    def _send(self, content_for_rank: Callable[[int], bytes]) -> None:
        try:
            for worker in self._workers:
                worker.messages.send(content_for_rank(worker.rank))
        except OSError as error:
            raise self.failure_cause(error) from None

    def gather_replies(self, reply_type: type[_Reply]) -> list[_Reply]:
        """Wait for one reply per worker, in any order. Raises LocalgenError if one fails."""
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
        """Return the cause of a failed collective or send: a lost worker if any, else `error`."""
        self._failure_noticed.set()
        self._failure_found.wait(_EXIT_STATUS_TIMEOUT_S)
        return self._failure or EngineDied(f"rank 0: {str(error).splitlines()[0]}")

    def shut_down(self, message: object) -> None:
        """Send the last message, `message`, after which the workers exit."""
        self._closing = True
        with contextlib.suppress(LocalgenError):
            self.broadcast(message)

    def close(self) -> None:
        """Stop all workers; without a prior `shut_down` they are killed at once."""
        patience_s = _SHUTDOWN_TIMEOUT_S if self._closing else 0.0
        self._closing = True
        for worker in self._workers:
            worker.close(patience_s)
        self._listener.join()
        for worker in self._workers:
            worker.messages.close()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.messages, selectors.EVENT_READ, worker)
            while selector.get_map():
                for ready, _ in selector.select():
                    try:
                        self._read_replies(ready.data)
                    except Exception as error:
                        selector.unregister(ready.fileobj)
                        is_gone = isinstance(error, EOFError | OSError)
                        if not self._closing:
                            cause = ready.data.exit_message() if is_gone else str(error)
                            self._record_failure(EngineDied(cause))

    def _read_replies(self, worker: _WorkerProcess) -> None:
        for content in worker.messages.read():
            reply = pickle.loads(content)
            if isinstance(reply, WorkerError):
                self._record_failure(error_from_code(reply.code, reply.message))
            else:
                self._replies.put(reply)

    def _record_failure(self, error: LocalgenError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._failure_found.set()
        self._replies.put(error)
        if self._exits_on_loss and not self._failure_noticed.wait(_NOTICE_TIMEOUT_S):
            log.error("%s", error)
            os._exit(1)


def worker_environment() -> dict[str, str]:
    """Return this environment with PYTHONPATH extended, so that workers import this localgen."""
    root = str(Path(localgen.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, known] if known else [root])}
