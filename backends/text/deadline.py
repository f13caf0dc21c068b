"""A limit on how long foreign Python may run in a thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class Overtime(Exception):
    """The time is up."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Overtime if the block runs longer than that.

    It is raised between two bytecodes: an endless loop in Python ends, a call into C does
    not end before it returns.
    """
    watch = _Watch(threading.get_ident())
    timer = threading.Timer(seconds, watch.strike)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        watch.leave()


class _Watch:
    def __init__(self, thread_id: int) -> None:
        self._thread_id = ctypes.c_ulong(thread_id)
        self._lock = threading.Lock()
        self._left = False

    def strike(self) -> None:
        with self._lock:
            if not self._left:
                self._raise_in_thread(ctypes.py_object(Overtime))

    def leave(self) -> None:
        with self._lock:
            self._left = True
            self._raise_in_thread(None)  # one that has not arrived yet comes too late

    def _raise_in_thread(self, kind: ctypes.py_object[type[Overtime]] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread_id, kind)
