"""The sockets of a client, so that another thread can end what waits on them."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import httpx

_OPENED = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")


class Sockets:
    """Every connection that a client of httpx opens, as its `trace` extension tells of them.

    A thread that reads from a socket does not notice that another one closes it; it does notice
    that the connection is shut down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._cut = threading.Event()

    @property
    def is_cut(self) -> bool:
        """Whether cut() was called."""
        return self._cut.is_set()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until cut()."""
        self._cut.wait(seconds)

    def watch(self, request: httpx.Request) -> None:
        """To be called with every request before it is sent."""
        request.extensions["trace"] = self._trace

    def cut(self) -> None:
        """End every connection there is or will be."""
        with self._lock:
            self._cut.set()
            for each in self._open:
                _shut(each)

    def _trace(self, event: str, found: dict[str, Any]) -> None:
        if not event.startswith("connection.") or not event.endswith(_OPENED):
            return
        opened = found["return_value"].get_extra_info("socket")
        with self._lock:
            self._open = [each for each in self._open if each.fileno() >= 0] + [opened]
        if self.is_cut:
            _shut(opened)


def _shut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        # not the method of a TLS socket, which would pull the cipher away from under the reader
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
