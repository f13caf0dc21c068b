"""Addresses where engines fetch blocks from each other: to parse, listen at, and connect to."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest

# host and port, or the path of a Unix socket
Address = tuple[str, int] | str
# family, and address as that family has it
_Target = tuple[int, Any]


def parse_address(text: str, option: str) -> Address:
    """HOST:PORT, or the path of a Unix socket, which contains a slash. Raises InvalidRequest.

    Port 0, to listen on any, is for kv_listen only.
    """
    if "/" in text:
        return text
    host, _, port = text.rpartition(":")
    least = 0 if option == "kv_listen" else 1
    is_port = port.isascii() and port.isdecimal() and least <= int(port) < 1 << 16
    if not host or not is_port:
        flag = "--" + option.replace("_", "-")
        raise InvalidRequest(
            f"{flag} is {text!r}: give HOST:PORT, or the path of a Unix socket with a slash",
            param=option,
        )
    return host.strip("[]"), int(port)


def address_text(address: Address) -> str:
    """As parse_address() reads it."""
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: Address) -> socket.socket:
    """Raises OSError if the address cannot be used."""
    if not isinstance(address, str):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family)
    path = Path(address)
    if path.is_socket() and not _is_in_use(address):
        path.unlink()  # of an engine that was killed
    sock = socket.socket(socket.AF_UNIX)
    old_mask = os.umask(0o177)
    try:
        sock.bind(address)
    finally:
        os.umask(old_mask)
    sock.listen()
    return sock


def _is_in_use(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


class Connector:
    """Connects to an address, and takes no longer than its caller may wait.

    Names are looked up in a thread; what is found too late serves the next call.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lookup: Future[list[_Target]] | None = None

    def connect(self, deadline_s: float) -> socket.socket:
        """Connect to the first address of the host that answers. Raises OSError, ValueError.

        deadline_s: of time.monotonic(), for the lookup and all addresses together.
        """
        failure: OSError = TimeoutError("timed out")
        targets = self._targets(deadline_s)
        for num_left, (family, target) in zip(range(len(targets), 0, -1), targets, strict=True):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                break
            sock = socket.socket(family)
            try:
                sock.settimeout(remaining_s / num_left)
                sock.connect(target)
                if family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                failure = error
            else:
                return sock
        raise failure

    def _targets(self, deadline_s: float) -> list[_Target]:
        if isinstance(self._address, str):
            return [(socket.AF_UNIX, self._address)]
        lookup = self._lookup or _start_lookup(*self._address)
        self._lookup = lookup
        try:
            return lookup.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(f"timed out looking up {self._address[0]}") from error
        finally:
            if lookup.done():
                self._lookup = None


def _start_lookup(host: str, port: int) -> Future[list[_Target]]:
    """Raises OSError if there is no thread for it."""
    lookup: Future[list[_Target]] = Future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            lookup.set_exception(error)
        else:
            lookup.set_result([(family, target) for family, _, _, _, target in found])

    try:
        threading.Thread(target=look_up, name="kv-lookup", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return lookup
