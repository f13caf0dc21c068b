"""Where another server is, and which variable of the environment holds its key."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_EXAMPLE = "http://host:8000/v1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of OpenAI's protocol. url: as base_url() gives it.

    name: what the user calls it, if anything. key_env: the variable that holds the key; the key
    itself is nowhere but in the environment. model: the one meant where none is named.
    """

    url: str
    name: str = ""
    key_env: str | None = None
    model: str | None = None

    @property
    def where(self) -> str:
        """The server as messages call it."""
        return f"{self.name} ({self.url})" if self.name else self.url

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def url_host(self) -> str:
        """The host as a URL has it: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")

    def key(self) -> str | None:
        """The key; None: this server gets none. BadSetting: the variable does not hold one."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise BadSetting(f"{self.key_env} is not set: it has to hold the key of {self.where}")
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise BadSetting(f"what {self.key_env} holds is no key: it has blanks or odd letters")
        return key


def base_url(text: str) -> str:
    """The URL that `/models` and `/chat/completions` come behind; `/v1` where there is no path.

    InvalidRequest: it is not such a URL, or it holds a secret.
    """
    parts = _split(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{text!r} is no URL of a server: give one such as {_EXAMPLE}")
    if parts.username or parts.password or parts.query or parts.fragment:
        # it may be a key: so the URL is not shown either
        raise InvalidRequest(
            "give the URL without user, password, query and fragment: "
            "a key belongs into a variable, which --api-key-env or --key-env names"
        )
    path = parts.path.rstrip("/")
    if path.endswith(("/chat/completions", "/completions", "/models")):
        raise InvalidRequest(f"{text}: give the part before it, such as {_EXAMPLE}")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def variable(text: str) -> str:
    """The name of a variable. InvalidRequest: it cannot be one; as it may be a key, unnamed."""
    if not _VARIABLE.fullmatch(text):
        raise InvalidRequest(
            "give the name of a variable that holds the key, such as CLUSTER_KEY, not the key"
        )
    return text


def _split(text: str) -> SplitResult:
    odd = not text.isprintable() or " " in text
    try:
        parts = urlsplit(text)
        odd = odd or parts.port == 0
    except ValueError:  # a bracket that is not closed, or a port that is no number
        odd = True
    if odd:
        raise InvalidRequest(f"{text!r} is no URL: give one such as {_EXAMPLE}")
    return parts
