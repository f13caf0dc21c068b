"""The servers that the user gave names to: one table each, in `endpoints.toml`."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting, config_dir, make_private_dir

_ENV_VAR_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_EXAMPLE_URL = "http://host:8000/v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FIELDS = ("url", "key_env", "model")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of OpenAI's protocol. url: as normalize_base_url() gives it.

    name: what the user calls it, if anything. key_env: the variable that holds the key; the key
    itself is nowhere but in the environment. model: the one meant where none is named.
    """

    url: str
    name: str = ""
    key_env: str | None = None
    model: str | None = None

    @property
    def display_name(self) -> str:
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

    def api_key(self) -> str | None:
        """The key; None: this server gets none. BadSetting: the variable does not hold one."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise BadSetting(
                f"{self.key_env} is not set: it has to hold the key of {self.display_name}"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise BadSetting(f"what {self.key_env} holds is no key: it has blanks or odd letters")
        return key


def normalize_base_url(text: str) -> str:
    """The URL that `/models` and `/chat/completions` come behind; `/v1` where there is no path.

    InvalidRequest: it is not such a URL, or it holds a secret.
    """
    parts = _split_url(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{text!r} is no URL of a server: give one such as {_EXAMPLE_URL}")
    if parts.username or parts.password or parts.query or parts.fragment:
        # it may be a key: so the URL is not shown either
        raise InvalidRequest(
            "give the URL without user, password, query and fragment: "
            "a key belongs into a variable, which --api-key-env or --key-env names"
        )
    path = parts.path.rstrip("/")
    if path.endswith(("/chat/completions", "/completions", "/models")):
        raise InvalidRequest(f"{text}: give the part before it, such as {_EXAMPLE_URL}")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def validate_env_var_name(text: str) -> str:
    """The name of a variable. InvalidRequest: it cannot be one; as it may be a key, unnamed."""
    if not _ENV_VAR_NAME.fullmatch(text):
        raise InvalidRequest(
            "give the name of a variable that holds the key, such as CLUSTER_KEY, not the key"
        )
    return text


def _split_url(text: str) -> SplitResult:
    odd = not text.isprintable() or " " in text
    try:
        parts = urlsplit(text)
        odd = odd or parts.port == 0
    except ValueError:  # a bracket that is not closed, or a port that is no number
        odd = True
    if odd:
        raise InvalidRequest(f"{text!r} is no URL: give one such as {_EXAMPLE_URL}")
    return parts


def endpoints_path() -> Path:
    """The file; it need not exist."""
    return config_dir() / "endpoints.toml"


def load_endpoints() -> dict[str, Endpoint]:
    """The servers by name. BadSetting: the file is damaged, or others may change it."""
    path = endpoints_path()
    return {name: _parse_endpoint(path, name, table) for name, table in _read_tables(path).items()}


def resolve_endpoint(text: str) -> Endpoint:
    """The server of a URL or of a name. InvalidRequest: neither."""
    if not _NAME.fullmatch(text):
        return Endpoint(normalize_base_url(text))
    known = load_endpoints()
    if text not in known:
        names = f"there is {', '.join(known)}" if known else "none has a name yet"
        raise InvalidRequest(
            f"no endpoint {text}: {names} (localgen endpoint add NAME URL), "
            "or give a URL such as http://host:8000/v1"
        )
    return known[text]


def add_endpoint(endpoint: Endpoint) -> None:
    """Keep a server under its name. InvalidRequest: it cannot be a name, or is one."""
    if not _NAME.fullmatch(endpoint.name):
        raise InvalidRequest(f"{endpoint.name!r} cannot be a name: use letters, digits, - and _")
    path = endpoints_path()
    known = load_endpoints()
    if endpoint.name in known:
        raise InvalidRequest(
            f"{endpoint.name} is {known[endpoint.name].url} already: "
            f"localgen endpoint rm {endpoint.name} frees the name"
        )
    kept = _read_text(path)
    gap = "" if not kept else "\n" if kept.endswith("\n") else "\n\n"
    given = [(field, getattr(endpoint, field)) for field in _FIELDS]
    lines = [f"{field} = {_toml_string(value)}\n" for field, value in given if value]
    _write(path, f"{kept}{gap}[{endpoint.name}]\n{''.join(lines)}")


def remove_endpoint(name: str) -> None:
    """Forget a server. InvalidRequest: there is none, or only an editor can do it."""
    path = endpoints_path()
    known = _read_tables(path)
    if name not in known:
        raise InvalidRequest(f"no endpoint {name}: there is {', '.join(known) or 'none'}")
    left = _without_table(_read_text(path), name)
    try:
        parsed = tomllib.loads(left)
    except tomllib.TOMLDecodeError:
        parsed = known
    if parsed != {other: table for other, table in known.items() if other != name}:
        raise InvalidRequest(f"{path} does not have {name} as a table of its own: edit it by hand")
    _write(path, left)


def _toml_string(text: str) -> str:
    # a JSON string is a TOML string, but for how it escapes what lies outside the basic plane
    return json.dumps(text, ensure_ascii=False)


def _without_table(text: str, name: str) -> str:
    """The text without the lines from `[name]` to the next table."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            inside = line.split("#")[0].strip() in (f"[{name}]", f'["{name}"]')
        if not inside:
            kept.append(line)
    return "".join(kept)


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        # whoever may change it decides where keys go
        if path.exists() and path.stat().st_mode & 0o022:
            raise BadSetting(f"others may write to {path}: chmod 600 it")
        return tomllib.loads(_read_text(path))
    except (OSError, ValueError) as error:
        raise BadSetting(f"{path}: {error}: correct it or remove it") from error


def _parse_endpoint(path: Path, name: str, table: Any) -> Endpoint:
    try:
        if not _NAME.fullmatch(name) or not isinstance(table, dict):
            raise InvalidRequest("not a table with a name of letters, digits, - and _")
        if unknown := sorted(set(table) - set(_FIELDS)):
            raise InvalidRequest(f"no field {unknown[0]}: there is {', '.join(_FIELDS)}")
        if not all(isinstance(value, str) and value for value in table.values()):
            raise InvalidRequest("give texts that are not empty")
        key_env = validate_env_var_name(table["key_env"]) if "key_env" in table else None
        return Endpoint(normalize_base_url(table.get("url", "")), name, key_env, table.get("model"))
    except InvalidRequest as error:
        raise BadSetting(f"{path}: {name}: {error.message}") from error


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _write(path: Path, text: str) -> None:
    make_private_dir(path.parent, "LOCALGEN_CONFIG_DIR")
    # whole or not at all: another command may be reading it
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise BadSetting(f"cannot write {path}: {error.strerror}") from error
