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
from localgen.backends.cuda.parallel.rank_model import Trouble
from localgen.backends.errors import EngineDied, LocalgenError, error_of

_MODULE = "localgen.backends.cuda.parallel.worker"
_Reply = TypeVar("_Reply")

# a rank that was told to leave does so within this time, or is killed
_LEAVE_S = 3.0
# a rank that closed its socket has ended, or will in a moment
_STATUS_S = 1.0
# the thread that computes learns of a loss by itself, unless it idles, or waits for a GPU that
# waits for the lost one
_NOTICE_S = 0.5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    orders: Connection[object, object]

    @classmethod
    def start(cls, rank: int) -> _Follower:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # closes with this process, whatever ends it
                env=_environment(),
            )
        return cls(rank, process, ours)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def end(self) -> str:
        """How it ended, in words; waits a moment for that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(_STATUS_S)
            how = f"ended with status {status}"
            if status < 0:
                how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
            return f"{self.name} {how}"
        return f"{self.name} closed its socket"

    def close(self, patience_s: float) -> None:
        """Wait for it to leave; end it if it does not."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Followers:
    """Starts ranks 1 and up. A rank that is lost is an error of whatever is asked next.

    Once `vital` is called, losing one ends this process within a second, should nobody ask.
    """

    def __init__(self, size: int) -> None:
        self._heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lost: LocalgenError | None = None
        self._found, self._noticed = threading.Event(), threading.Event()
        self._vital = self._closing = False
        self._followers = [_Follower.start(rank) for rank in range(1, size)]
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def vital(self) -> None:
        """From now on this process cannot go on without them."""
        self._vital = True

    def tell_each(self, order: Callable[[int], object]) -> None:
        """Send each what `order` says for its rank."""
        try:
            for follower in self._followers:
                follower.orders.send(order(follower.rank))
        except OSError as error:
            raise self.loss(error) from None

    def tell(self, order: object) -> None:
        """Send all of them the same."""
        packed = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        try:
            for follower in self._followers:
                follower.orders.send_bytes(packed)
        except OSError as error:
            raise self.loss(error) from None

    def replies(self, kind: type[_Reply]) -> list[_Reply]:
        """What they answer, one each, in any order. LocalgenError: one cannot, or is lost."""
        found: list[_Reply] = []
        while len(found) < len(self._followers):
            reply = self._heard.get()
            if isinstance(reply, LocalgenError):
                self._noticed.set()
                raise reply
            assert isinstance(reply, kind), reply
            found.append(reply)
        return found

    def loss(self, error: Exception) -> LocalgenError:
        """Why something failed that needs all ranks: a rank is lost, if so; else the error."""
        self._noticed.set()
        self._found.wait(_STATUS_S)
        return self._lost or EngineDied(f"rank 0: {str(error).splitlines()[0]}")

    def dismiss(self, order: object) -> None:
        """Tell them to leave; the last thing they are told."""
        self._closing = True
        with contextlib.suppress(LocalgenError):
            self.tell(order)

    def close(self) -> None:
        """End all of them; those that were not dismissed at once."""
        patience_s = _LEAVE_S if self._closing else 0.0
        self._closing = True
        for follower in self._followers:
            follower.close(patience_s)
        self._listener.join()
        for follower in self._followers:
            follower.orders.close()

    def _listen(self) -> None:
        by_orders = {follower.orders: follower for follower in self._followers}
        while by_orders:
            for orders in wait(list(by_orders)):
                assert isinstance(orders, Connection)
                try:
                    heard = orders.recv()
                except (EOFError, OSError):
                    heard = None
                    follower = by_orders.pop(orders)
                    if not self._closing:
                        self._lose(EngineDied(follower.end()))
                if isinstance(heard, Trouble):
                    self._lose(error_of(heard.code, heard.message))
                elif heard is not None:
                    self._heard.put(heard)

    def _lose(self, error: LocalgenError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._found.set()
        self._heard.put(error)
        if self._vital and not self._noticed.wait(_NOTICE_S):
            log.error("%s", error)
            os._exit(1)


def _environment() -> dict[str, str]:
    """This environment, and localgen importable from where it was imported here."""
    root = str(Path(localgen.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, known] if known else [root])}
