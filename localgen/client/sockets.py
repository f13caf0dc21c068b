"""The sockets of an httpx client, so that another thread can end the requests on them."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import httpx

_CONNECT_EVENTS = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")


class AbortableSockets:
    """Tracks the sockets that an httpx client opens, by its `trace` extension.

    Closing a socket does not wake a thread that reads from it; shutting it down does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_sockets: list[socket.socket] = []
        self._aborted = threading.Event()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    def sleep(self, seconds: float) -> None:
        """Sleep; abort() ends it."""
        self._aborted.wait(seconds)

    def track_request(self, request: httpx.Request) -> None:
        """Request hook of the httpx client."""
        request.extensions["trace"] = self._on_trace

    def abort(self) -> None:
        """Shut down every socket, open now or later."""
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
    with contextlib.suppress(OSError):  # already closed
        # not SSLSocket.shutdown, which removes the TLS layer while another thread reads
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
