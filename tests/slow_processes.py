"""Processes that are stopped most of the time, so that nothing ends unseen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread


@contextmanager
def slowed(
    pids: Callable[[], Sequence[int]], *, run_s: float = 0.003, stop_s: float = 0.297
) -> Iterator[None]:
    """Let processes run for run_s and stop them for stop_s, in turn. pids: called each time."""
    done = Event()

    def signal_all(number: signal.Signals, found: Sequence[int]) -> None:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def alternate() -> None:
        while not done.wait(run_s):
            found = pids()
            if found:
                signal_all(signal.SIGSTOP, found)
                done.wait(stop_s)
                signal_all(signal.SIGCONT, found)

    thread = Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
