"""Loopback ports for programs that `localgen launch` starts, each with an API key of its own."""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

_KEY_BYTES = 32


class Listener(Protocol):
    """A listening socket. port: its number."""

    @property
    def port(self) -> int: ...

    def close(self) -> None:
        """Stop listening; connections that are open stay open."""


@dataclass(frozen=True, slots=True)
class PrivatePort:
    """url: base URL without a path. key: the only API key that is valid there."""

    url: str
    key: str


class PrivatePorts:
    """The ports and their keys. A port that was closed refuses what its open connections send."""

    def __init__(self, listen: Callable[[], Awaitable[Listener]]) -> None:
        self._listen = listen
        self._keys: dict[int, str | None] = {}  # None: closed
        self._stabilizing: set[int] = set()

    @contextlib.asynccontextmanager
    async def open(self, *, stabilize: bool = False) -> AsyncIterator[PrivatePort]:
        """Listen on a free port until the block ends. Raises OSError.

        stabilize: for the requests that come there, as in Request.
        """
        listener = await self._listen()
        port = listener.port
        if stabilize:
            self._stabilizing.add(port)
        key = self._keys[port] = secrets.token_urlsafe(_KEY_BYTES)
        try:
            yield PrivatePort(f"http://127.0.0.1:{port}", key)
        finally:
            self._keys[port] = None
            self._stabilizing.discard(port)
            listener.close()

    def has(self, port: int) -> bool:
        """Return True for a private port, open or closed."""
        return port in self._keys

    def stabilizes(self, port: int) -> bool:
        """Return True if requests that come to this port are stabilized."""
        return port in self._stabilizing

    def accepts_key(self, port: int, api_key: str) -> bool:
        key = self._keys.get(port)
        given = api_key.encode(errors="replace")
        return key is not None and hmac.compare_digest(given, key.encode())
