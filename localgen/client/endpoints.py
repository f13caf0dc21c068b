"""Remote servers, and those with a name: one table each in `endpoints.toml`."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting, ServerSettings, config_dir
from localgen.toml_store import TomlStore

_ENV_VAR_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_EXAMPLE_URL = "http://host:8000/v1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# the name of the cluster that `localgen cluster up` started, unless the user gave it to another
CLUSTER = "cluster"
_FIELDS = ("url", "key_env", "model")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's protocol. url: its base URL from normalize_base_url().

    name: the user's name for it, or empty. key_env: the environment variable with the API key; the
    key itself is never stored. model: the default model.
    """

    url: str
    name: str = ""
    key_env: str | None = None
    model: str | None = None

    @property
    def display_name(self) -> str:
        """Name and URL, for messages."""
        return f"{self.name} ({self.url})" if self.name else self.url

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def url_host(self) -> str:
        """The host as in a URL: an IPv6 address is in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def is_loopback(self) -> bool:
        """True if the server is on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_restarted(self) -> bool:
        """True if the server is started again when it ends."""
        return False

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")

    def api_key(self) -> str | None:
        """The API key, or None. Raises BadSetting if the variable does not hold a valid one."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise BadSetting(
                f"{self.key_env} is not set: set it to the API key of {self.display_name}"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise BadSetting(
                f"{self.key_env} is not a valid API key: it has spaces or special characters"
            )
        return key


@dataclass(frozen=True, slots=True)
class OwnCluster(Endpoint):
    """The user's own cluster. key: one that its gateway takes, unless key_env names another."""

    key: str | None = field(default=None, repr=False)

    @property
    def is_restarted(self) -> bool:
        """True until `localgen cluster down`."""
        from localgen.cluster.running import RunningCluster

        return RunningCluster.find(ServerSettings.from_environment()) is not None

    def api_key(self) -> str | None:
        return self.key if self.key_env is None else Endpoint.api_key(self)


def normalize_base_url(text: str) -> str:
    """The URL that precedes `/models` and `/chat/completions`; adds `/v1` if there is no path.

    Raises InvalidRequest if the URL is invalid or may contain a secret.
    """
    parts = _split_url(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{text!r} is not the URL of a server, e.g. {_EXAMPLE_URL}")
    if parts.username or parts.password or parts.query or parts.fragment:
        # the URL may contain an API key, so the message does not repeat it
        raise InvalidRequest(
            "the URL must not contain a user, password, query or fragment: "
            "put the API key into a variable and name it with --api-key-env or --key-env"
        )
    path = parts.path.rstrip("/")
    if path.endswith(("/chat/completions", "/completions", "/models")):
        raise InvalidRequest(f"{text}: give the base URL without the method, e.g. {_EXAMPLE_URL}")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def validate_env_var_name(text: str) -> str:
    """Return the name of a variable. Raises InvalidRequest, without the text: it may be a key."""
    if not _ENV_VAR_NAME.fullmatch(text):
        raise InvalidRequest(
            "give the name of a variable that holds the API key, e.g. TEAM_KEY, not the key"
        )
    return text


def _split_url(text: str) -> SplitResult:
    is_valid = text.isprintable() and " " not in text
    try:
        parts = urlsplit(text)
        is_valid = is_valid and parts.port != 0
    except ValueError:  # an unclosed bracket or an invalid port
        is_valid = False
    if not is_valid:
        raise InvalidRequest(f"{text!r} is not a URL, e.g. {_EXAMPLE_URL}")
    return parts


def endpoints_path() -> Path:
    """Path of the file, which may not exist."""
    return config_dir() / "endpoints.toml"


def load_endpoints() -> dict[str, Endpoint]:
    """Endpoints by name. Raises BadSetting if the file is invalid or writable by other users."""
    path = endpoints_path()
    return {name: _parse_endpoint(path, name, table) for name, table in _read_tables().items()}


def resolve_endpoint(text: str) -> Endpoint:
    """The endpoint of a URL or a name. Raises InvalidRequest if there is none."""
    if not _NAME.fullmatch(text):
        return Endpoint(normalize_base_url(text))
    known = load_endpoints()
    if text == CLUSTER and text not in known:
        return _own_cluster()
    if text not in known:
        names = f"endpoints are {', '.join(known)}" if known else "none is defined"
        raise InvalidRequest(
            f"no endpoint {text}: {names} (localgen endpoint add NAME URL), "
            f"or give a URL, e.g. {_EXAMPLE_URL}"
        )
    return known[text]


def _own_cluster() -> Endpoint:
    """The cluster that this user runs. Raises InvalidRequest if there is none, and BadSetting if
    its keys cannot be read."""
    from localgen.cluster.running import RunningCluster

    running = RunningCluster.find(ServerSettings.from_environment())
    if running is None:
        raise InvalidRequest(
            "no cluster of yours runs on this machine: `localgen cluster up` starts one, or give "
            "the URL of another"
        )
    url = normalize_base_url(running.url)
    return OwnCluster(url, CLUSTER, model=running.model, key=running.api_key())


def add_endpoint(endpoint: Endpoint) -> None:
    """Save an endpoint. Raises InvalidRequest if its name is invalid or taken."""
    if not _NAME.fullmatch(endpoint.name):
        raise InvalidRequest(f"invalid name {endpoint.name!r}: use letters, digits, - and _")
    store = _store()
    with store.locked():
        known = load_endpoints()
        if endpoint.name in known:
            raise InvalidRequest(
                f"endpoint {endpoint.name} already exists ({known[endpoint.name].url}): "
                f"remove it with localgen endpoint rm {endpoint.name}"
            )
        values = {field: getattr(endpoint, field) for field in _FIELDS}
        table = {field: value for field, value in values.items() if value}
        store.change(lambda document: document.update({endpoint.name: table}))


def remove_endpoint(name: str) -> None:
    """Remove an endpoint. Raises InvalidRequest if there is none."""
    store = _store()
    with store.locked():
        known = _read_tables()
        if name not in known:
            raise InvalidRequest(f"no endpoint {name}, endpoints are {', '.join(known) or 'none'}")
        store.change(lambda document: document.pop(name))


def _store() -> TomlStore:
    return TomlStore(endpoints_path(), "LOCALGEN_CONFIG_DIR")


def _read_tables() -> dict[str, Any]:
    path = endpoints_path()
    try:
        is_unsafe = path.exists() and path.stat().st_mode & 0o022
    except OSError as error:
        raise BadSetting(f"{path}: {error}: correct it or remove it") from error
    if is_unsafe:  # a user who can change the file can redirect API keys
        raise BadSetting(f"{path} is writable by other users: chmod 600 it")
    return _store().read()


def _parse_endpoint(path: Path, name: str, table: Any) -> Endpoint:
    try:
        if not _NAME.fullmatch(name) or not isinstance(table, dict):
            raise InvalidRequest("not a table with a name of letters, digits, - and _")
        if unknown := sorted(set(table) - set(_FIELDS)):
            raise InvalidRequest(f"unknown field {unknown[0]}, fields are {', '.join(_FIELDS)}")
        if not all(isinstance(value, str) and value for value in table.values()):
            raise InvalidRequest("the values must be strings that are not empty")
        key_env = validate_env_var_name(table["key_env"]) if "key_env" in table else None
        return Endpoint(normalize_base_url(table.get("url", "")), name, key_env, table.get("model"))
    except InvalidRequest as error:
        raise BadSetting(f"{path}: {name}: {error.message}") from error
