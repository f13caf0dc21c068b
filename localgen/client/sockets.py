"""The sockets of a client, so that another thread can end what waits on them."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import httpx

_CONNECT_EVENTS = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")


class AbortableSockets:
    """Every connection that a client of httpx opens, as its `trace` extension tells of them.

    A thread that reads from a socket does not notice that another one closes it; it does notice
    that the connection is shut down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_sockets: list[socket.socket] = []
        self._aborted = threading.Event()

    @property
    def is_aborted(self) -> bool:
        """Whether abort() was called."""
        return self._aborted.is_set()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until abort()."""
        self._aborted.wait(seconds)

    def track_request(self, request: httpx.Request) -> None:
        """To be called with every request before it is sent."""
        request.extensions["trace"] = self._on_trace

    def abort(self) -> None:
        """End every connection there is or will be."""
        with self._lock:
            self._aborted.set()
            for each in self._open_sockets:
                _shut_down(each)

    def _on_trace(self, event: str, info: dict[str, Any]) -> None:
        if not event.startswith("connection.") or not event.endswith(_CONNECT_EVENTS):
            return
        opened = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._open_sockets = [each for each in self._open_sockets if each.fileno() >= 0] + [
                opened
            ]
        if self.is_aborted:
            _shut_down(opened)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        # not the method of a TLS socket, which would pull the cipher away from under the reader
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
