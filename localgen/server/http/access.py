"""Who may ask the server over TCP, and how much. On the Unix socket the file's mode decides."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from localgen.config import BadSetting

DEFAULT_PORT = 8080
MAX_BODY_BYTES = 32 << 20
_MIN_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What each key may use in a minute; None: as much as it likes."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """host, port: where to listen; no port: on the Unix socket alone. keys: any of them will do.

    cors_origins: web pages that may ask; `*` is all. allowed_hosts: names of this server besides
    its addresses, localhost and the machine's own. timeout_s: longest a request may take.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    rate_limit: RateLimit = RateLimit()
    timeout_s: float | None = None
    max_body_bytes: int = MAX_BODY_BYTES

    def validate(self) -> None:
        """BadSetting: this would let in who should not be."""
        if any(len(key) < _MIN_KEY_LENGTH or not key.isprintable() for key in self.keys):
            raise BadSetting(f"an API key needs {_MIN_KEY_LENGTH} or more printable characters")
        if self.port is not None and not self.keys and not is_loopback(self.host):
            raise BadSetting(
                f"--host {self.host} lets others ask: give --api-key or --api-key-file, or "
                "listen on 127.0.0.1"
            )

    def accepts_key(self, api_key: str) -> bool:
        """Whether this is one of the keys. Takes as long whichever it is, and if it is none."""
        given = api_key.encode(errors="replace")
        # no `any`: it would stop at the one that fits
        return sum([hmac.compare_digest(given, known.encode()) for known in self.keys]) > 0

    def allows_host(self, host: str) -> bool:
        """Whether a Host header means this server. An address does; a name that anybody could have
        let point here does not (DNS rebinding)."""
        name = re.sub(r":\d+$", "", host).strip("[]").rstrip(".").lower()
        if _is_address(name):
            return True
        own = {"localhost", self.host, socket.gethostname(), *self.allowed_hosts}
        return name in {known.lower() for known in own}

    def allows_origin(self, origin: str) -> bool:
        """Whether a web page from there may ask."""
        return "*" in self.cors_origins or origin in self.cors_origins


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; `#` begins a comment. BadSetting."""
    try:
        if path.stat().st_mode & 0o077:
            raise BadSetting(f"--api-key-file {path}: others may read it, chmod 600 it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadSetting(f"--api-key-file {path}: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise BadSetting(f"--api-key-file {path} holds no key")
    return keys


def parse_rate_limit(text: str) -> RateLimit:
    """`60` requests a minute, or `60,100000`: and so many tokens; `0`: no limit. BadSetting."""
    match = re.fullmatch(r"(\d{1,9})(?:,(\d{1,12}))?", text.strip())
    if match is None:
        raise BadSetting(f"--rate-limit {text}: give requests, or requests,tokens, a minute")
    return RateLimit(int(match[1]) or None, int(match[2] or 0) or None)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def open_tcp_socket(access: AccessPolicy) -> socket.socket:
    """The TCP socket. BadSetting: it cannot be had."""
    assert access.port is not None
    try:
        family = socket.getaddrinfo(access.host, access.port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((access.host, access.port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadSetting(f"cannot listen on {access.host}:{access.port}: {reason}") from error
    return sock
