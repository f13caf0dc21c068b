"""Notice a server that does not answer while a request waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# as long as an engine may send nothing, of which the server tells its clients
SILENT_AFTER_S = 10.0


class ServerWatch:
    """Asks the server whether it answers when a request got nothing for ten seconds.

    A context manager around one request, of the function to call for each chunk. A thread of its
    own asks, since the other is blocked. find_problem: returns why the server does not answer; None
    if it does. notify: called with that, again each time that the silence has doubled.
    """

    def __init__(
        self, find_problem: Callable[[], str | None], notify: Callable[[str], None]
    ) -> None:
        self._find_problem = find_problem
        self._notify = notify
        self._heard_s = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> Callable[[], None]:
        threading.Thread(target=self._watch, daemon=True).start()
        return self._hear

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _hear(self) -> None:
        self._heard_s = time.monotonic()

    def _watch(self) -> None:
        limit_s = SILENT_AFTER_S
        while not self._ended.wait(self._heard_s + limit_s - time.monotonic()):
            heard_s = self._heard_s
            if time.monotonic() - heard_s < limit_s:
                limit_s = SILENT_AFTER_S
                continue
            problem = self._find_problem()
            if problem and heard_s == self._heard_s and not self._ended.is_set():
                self._notify(f"{problem}; Ctrl+C stops")
            limit_s *= 2
