"""The gateway's HTTP client, which notices that a replica's machine is gone."""

from __future__ import annotations

import socket

import httpx

_CONNECT_TIMEOUT_S = 2.0
_MAX_KEPT_CONNECTIONS = 256
# a machine without power or network closes no connection: after this time, what was sent to it is
# not confirmed, or it does not answer probes, of which the first comes after _IDLE_S
_SILENT_S, _IDLE_S, _PROBE_S = 10, 4, 2
# of a TCP socket, by their names in Linux; other systems have some of them
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE_S,
    "TCP_KEEPINTVL": _PROBE_S,
    "TCP_KEEPCNT": (_SILENT_S - _IDLE_S) // _PROBE_S,
    "TCP_USER_TIMEOUT": _SILENT_S * 1000,
}


def create_client() -> httpx.AsyncClient:
    """A client for requests of any length to replicas.

    Their errors are those of httpx, within some 10 s after a machine is gone; on Linux.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_KEPT_CONNECTIONS)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=_socket_options())
    return httpx.AsyncClient(
        transport=transport, timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    )


def _socket_options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _TCP_OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    return options
