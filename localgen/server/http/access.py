"""Access policy for TCP clients. The Unix socket is protected by its file mode instead."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

from localgen.config import BadSetting

DEFAULT_PORT = 8080
MAX_BODY_BYTES = 32 << 20
_MIN_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Limits per account and minute. None: unlimited."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Access rules for TCP clients, and request limits.

    port: None to listen on the Unix socket only. keys: accepted API keys, or empty if none is
    required. cors_origins: allowed web origins, `*` for all. allowed_hosts: accepted Host headers,
    in addition to addresses, localhost, `host` and the machine's hostname. timeout_s: maximum
    duration of a request. stabilize: all requests, as in Request. gateway_secret: of the
    gateway whose headers are obeyed, or empty; see requests/caller.py.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    rate_limit: RateLimit = RateLimit()
    timeout_s: float | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    stabilize: bool = False
    gateway_secret: str = field(default="", repr=False)

    def validate(self) -> None:
        """Raise BadSetting for a weak API key, or a non-loopback host without keys."""
        if any(len(key) < _MIN_KEY_LENGTH or not key.isprintable() for key in self.keys):
            raise BadSetting(f"an API key needs at least {_MIN_KEY_LENGTH} printable characters")
        if self.port is not None and not self.keys and not is_loopback(self.host):
            raise BadSetting(
                f"--host {self.host} is reachable from other machines: set --api-key or "
                "--api-key-file, or listen on 127.0.0.1"
            )

    def accepts_key(self, api_key: str) -> bool:
        """Return True if the key is valid. Constant time: every key is compared."""
        given = api_key.encode(errors="replace")
        # not any(): it would stop at the first match
        return sum([hmac.compare_digest(given, known.encode()) for known in self.keys]) > 0

    def is_gateway(self, secret: str) -> bool:
        """Return True if this is the secret of the gateway of a cluster."""
        given, known = secret.encode(errors="replace"), self.gateway_secret.encode()
        return bool(known) and hmac.compare_digest(given, known)

    def allows_host(self, host: str) -> bool:
        """Return True if the Host header is an address or a known name of this server.

        Other names are rejected: a foreign domain may resolve to this address (DNS rebinding).
        """
        name = re.sub(r":\d+$", "", host).strip("[]").rstrip(".").lower()
        if _is_address(name):
            return True
        own = {"localhost", self.host, socket.gethostname(), *self.allowed_hosts}
        return name in {known.lower() for known in own}

    def allows_origin(self, origin: str) -> bool:
        return "*" in self.cors_origins or origin in self.cors_origins


def is_loopback(host: str) -> bool:
    """Return True for localhost and loopback addresses."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys from a file, one per line; lines that start with `#` are comments.

    Raises BadSetting if the file is unreadable, has no key, or other users can access it. The group
    may read a file of root, as PostgreSQL has it: a mounted secret is given to the server so.
    """
    try:
        found = path.stat()
        is_given = found.st_uid == 0 and os.getuid() != 0
        if found.st_mode & (0o037 if is_given else 0o077):
            raise BadSetting(f"--api-key-file {path}: accessible to other users, chmod 600 it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadSetting(f"--api-key-file {path}: {reason}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise BadSetting(f"--api-key-file {path} contains no key")
    return keys


def parse_rate_limit(text: str) -> RateLimit:
    """Parse `REQUESTS` or `REQUESTS,TOKENS` per minute, or 0 for no limit.

    Raises BadSetting if the text has another form.
    """
    match = re.fullmatch(r"(\d{1,9})(?:,(\d{1,12}))?", text.strip())
    if match is None:
        raise BadSetting(f"--rate-limit {text}: expected REQUESTS or REQUESTS,TOKENS per minute")
    return RateLimit(int(match[1]) or None, int(match[2] or 0) or None)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def open_tcp_socket(access: AccessPolicy) -> socket.socket:
    """Bind and return the TCP socket. Raises BadSetting if that fails."""
    assert access.port is not None
    try:
        family = socket.getaddrinfo(access.host, access.port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((access.host, access.port), family=family)
        # inherited by connections, for which asyncio does not set it, as their protocol is 0;
        # without it, the body of a response waits for the acknowledgement of its headers
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        place = host_and_port(access.host, access.port)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            remedy = "is in use by another program: choose another --port"
            raise BadSetting(f"{place} {remedy}") from error
        # asyncio's text repeats the address
        reason = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise BadSetting(f"cannot listen on {place}: {reason}") from error
    return sock


def host_and_port(host: str, port: int) -> str:
    """Format as in a URL: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
