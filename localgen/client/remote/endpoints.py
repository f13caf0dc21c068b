"""The servers that the user gave names to: one table each, in `endpoints.toml`."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.client.remote.endpoint import Endpoint, base_url, variable
from localgen.config import BadSetting, config_dir, make_private

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FIELDS = ("url", "key_env", "model")


def endpoints_path() -> Path:
    """The file; it need not exist."""
    return config_dir() / "endpoints.toml"


def endpoints() -> dict[str, Endpoint]:
    """The servers by name. BadSetting: the file is damaged, or others may change it."""
    path = endpoints_path()
    return {name: _endpoint(path, name, table) for name, table in _tables(path).items()}


def endpoint(text: str) -> Endpoint:
    """The server of a URL or of a name. InvalidRequest: neither."""
    if not _NAME.fullmatch(text):
        return Endpoint(base_url(text))
    known = endpoints()
    if text not in known:
        names = f"there is {', '.join(known)}" if known else "none has a name yet"
        raise InvalidRequest(
            f"no endpoint {text}: {names} (localgen endpoint add NAME URL), "
            "or give a URL such as http://host:8000/v1"
        )
    return known[text]


def add(new: Endpoint) -> None:
    """Keep a server under its name. InvalidRequest: it cannot be a name, or is one."""
    if not _NAME.fullmatch(new.name):
        raise InvalidRequest(f"{new.name!r} cannot be a name: use letters, digits, - and _")
    path = endpoints_path()
    known = endpoints()
    if new.name in known:
        raise InvalidRequest(
            f"{new.name} is {known[new.name].url} already: "
            f"localgen endpoint rm {new.name} frees the name"
        )
    kept = _text(path)
    gap = "" if not kept else "\n" if kept.endswith("\n") else "\n\n"
    given = [(field, getattr(new, field)) for field in _FIELDS]
    lines = [f"{field} = {_quoted(value)}\n" for field, value in given if value]
    _write(path, f"{kept}{gap}[{new.name}]\n{''.join(lines)}")


def remove(name: str) -> None:
    """Forget a server. InvalidRequest: there is none, or only an editor can do it."""
    path = endpoints_path()
    known = _tables(path)
    if name not in known:
        raise InvalidRequest(f"no endpoint {name}: there is {', '.join(known) or 'none'}")
    left = _without(_text(path), name)
    try:
        parsed = tomllib.loads(left)
    except tomllib.TOMLDecodeError:
        parsed = known
    if parsed != {other: table for other, table in known.items() if other != name}:
        raise InvalidRequest(f"{path} does not have {name} as a table of its own: edit it by hand")
    _write(path, left)


def _quoted(text: str) -> str:
    # a JSON string is a TOML string, but for how it escapes what lies outside the basic plane
    return json.dumps(text, ensure_ascii=False)


def _without(text: str, name: str) -> str:
    """The text without the lines from `[name]` to the next table."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            inside = line.split("#")[0].strip() in (f"[{name}]", f'["{name}"]')
        if not inside:
            kept.append(line)
    return "".join(kept)


def _tables(path: Path) -> dict[str, Any]:
    try:
        # whoever may change it decides where keys go
        if path.exists() and path.stat().st_mode & 0o022:
            raise BadSetting(f"others may write to {path}: chmod 600 it")
        return tomllib.loads(_text(path))
    except (OSError, ValueError) as error:
        raise BadSetting(f"{path}: {error}: correct it or remove it") from error


def _endpoint(path: Path, name: str, table: Any) -> Endpoint:
    try:
        if not _NAME.fullmatch(name) or not isinstance(table, dict):
            raise InvalidRequest("not a table with a name of letters, digits, - and _")
        if unknown := sorted(set(table) - set(_FIELDS)):
            raise InvalidRequest(f"no field {unknown[0]}: there is {', '.join(_FIELDS)}")
        if not all(isinstance(value, str) and value for value in table.values()):
            raise InvalidRequest("give texts that are not empty")
        key_env = variable(table["key_env"]) if "key_env" in table else None
        return Endpoint(base_url(table.get("url", "")), name, key_env, table.get("model"))
    except InvalidRequest as error:
        raise BadSetting(f"{path}: {name}: {error.message}") from error


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _write(path: Path, text: str) -> None:
    make_private(path.parent, "LOCALGEN_CONFIG_DIR")
    # whole or not at all: another command may be reading it
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise BadSetting(f"cannot write {path}: {error.strerror}") from error
