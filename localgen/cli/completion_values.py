"""Names and option values for shell completion.

Nothing here starts a server, uses the network or imports a large library: the shell waits for the
result at every key press.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.model_shape import CACHE_ELEMENT_BYTES

# time limit for each socket operation: a busy server must not block the shell
_SERVER_TIMEOUT_S = 0.15
# names that no shell splits; other names are not offered but can still be typed
_SAFE_NAME = re.compile(r"[\w.:/@+~-]+", re.ASCII)
_PATH_PREFIXES = ("/", "./", "../", "~")

# known option values by field
_OPTION_VALUES = {
    "cache_type_k": tuple(CACHE_ELEMENT_BYTES),
    "cache_type_v": tuple(CACHE_ELEMENT_BYTES),
    "device": ("cpu", "cuda", "cuda:0"),
    "keep_alive": ("30s", "5m", "1h", "0", "-1"),
}
# fields of the options that accept @FILE
FILE_OPTIONS = ("system", "json_schema", "regex", "grammar")

Completer = Callable[[str], list[str]]


def option_completer(field: str) -> Completer | None:
    """Return the completer of an option's values, or None if it has none."""
    if field in FILE_OPTIONS:
        return _complete_at_file
    if field == "draft":
        return _complete_draft
    values = _OPTION_VALUES.get(field)
    return None if values is None else lambda incomplete: _filter_by_prefix(incomplete, values)


def complete_model(incomplete: str) -> list[str]:
    """Complete a model to run: local models, then the catalog; .gguf files if none match."""
    if incomplete.startswith(_PATH_PREFIXES):
        return complete_path(incomplete, ".gguf")
    names = [*_local_names(), *_catalog_names(incomplete)]
    return _filter_by_prefix(incomplete, names) or complete_path(incomplete, ".gguf")


def _complete_draft(incomplete: str) -> list[str]:
    """Complete `--draft`: a keyword or a model."""
    words = _filter_by_prefix(incomplete, ("ngram", "auto", "none"))
    return words + [name for name in complete_model(incomplete) if name not in words]


def complete_catalog_model(incomplete: str) -> list[str]:
    """Complete a model to download."""
    return _filter_by_prefix(incomplete, [*_catalog_names(incomplete), *_cached_names()])


def complete_removable_model(incomplete: str) -> list[str]:
    """Complete a model of the cache, an alias or a preset."""
    return _filter_by_prefix(incomplete, [*_cached_names(), *_own_names("models")])


def complete_preset(incomplete: str) -> list[str]:
    """Complete a preset."""
    return _filter_by_prefix(incomplete, _own_names("presets"))


def complete_adapter(incomplete: str) -> list[str]:
    """Complete a LoRA adapter."""
    return _filter_by_prefix(incomplete, _own_names("adapters"))


def complete_mcp_server(incomplete: str) -> list[str]:
    """Complete an MCP server."""
    from localgen.mcp_tools.server_file import server_names

    return _filter_by_prefix(incomplete, server_names())


def complete_running_model(incomplete: str) -> list[str]:
    """Complete a loaded model."""
    return _filter_by_prefix(incomplete, _running_names())


def complete_stored_model(incomplete: str) -> list[str]:
    """Complete a model whose computed prefixes are on disk."""
    from localgen.backends.kv_store.inventory import model_names
    from localgen.config import ServerSettings

    return _filter_by_prefix(incomplete, model_names(ServerSettings.from_environment().kv_dir))


def complete_session(incomplete: str) -> list[str]:
    """Complete the name of a stored session."""
    from localgen.chat.database import STORE_NAME, session_names
    from localgen.config import ServerSettings

    store = ServerSettings.from_environment().state_dir / STORE_NAME
    return _filter_by_prefix(incomplete, session_names(store))


def complete_path(incomplete: str, suffix: str = "") -> list[str]:
    """Complete a path: folders, with a trailing /, and files with the suffix.

    The typed part of the path is kept as it is, for example `~/`.
    """
    folder, slash, start = incomplete.rpartition("/")
    inside = Path(folder + slash or ".").expanduser()
    found = []
    for entry in sorted(inside.iterdir()):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        if entry.is_dir():
            found.append(f"{folder}{slash}{entry.name}/")
        elif entry.name.lower().endswith(suffix):
            found.append(f"{folder}{slash}{entry.name}")
    return found


def _complete_at_file(incomplete: str) -> list[str]:
    return (
        [f"@{path}" for path in complete_path(incomplete[1:])] if incomplete.startswith("@") else []
    )


def _filter_by_prefix(incomplete: str, names: Iterable[str]) -> list[str]:
    """Names that start with `incomplete`, ignoring case; the typed letters keep their case."""
    prefix = incomplete.lower()
    known = dict.fromkeys(name for name in names if name.lower().startswith(prefix))
    spelled = [incomplete + name[len(incomplete) :] for name in known]
    return [name for name in spelled if _SAFE_NAME.fullmatch(name)]


def _local_names() -> Iterator[str]:
    from localgen.hub.packaged import PACKAGED_MODELS

    yield from PACKAGED_MODELS
    yield from _own_names("models")
    yield from _cached_names()
    yield from _running_names()


def _own_names(kind: Literal["models", "presets", "adapters"]) -> Iterator[str]:
    """Aliases, presets and adapters, or only some of these."""
    from localgen.hub.models_file import read_models_file

    try:
        yield from getattr(read_models_file(), kind)
    except LocalgenError:
        return  # the command itself reports a damaged file


def _cached_names() -> Iterator[str]:
    from localgen.hub.cache_scan import cached_names

    try:
        yield from cached_names()
    except OSError:
        return


def _catalog_names(incomplete: str) -> Iterator[str]:
    """Names of the catalog; after `NAME:`, also the quantizations of that model."""
    from localgen.hub import catalog
    from localgen.hub.quants import AUTO_QUANT

    yield from (entry.alias for entry in catalog.catalog_entries())
    for entry in catalog.catalog_entries():
        yield from entry.names
    head, colon, _ = incomplete.rpartition(":")
    found = catalog.find_entry(head) if colon else None
    if found is not None:
        yield from (f"{head}:{tag}" for tag in (AUTO_QUANT, *found[0].gguf.sizes))


def _running_names() -> Iterator[str]:
    try:
        yield from (str(model["name"]) for model in json.loads(_fetch_stats())["models"])
    except (OSError, LocalgenError, ValueError, KeyError, TypeError):
        return  # no server, or it is too busy to answer in time


def _fetch_stats() -> bytes:
    """Body of /v1/stats. Uses a plain socket because HTTP libraries are slow to import."""
    from localgen.config import ServerSettings

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_SERVER_TIMEOUT_S)
        sock.connect(str(ServerSettings.from_environment().socket_path))
        sock.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: localgen\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return reply.partition(b"\r\n\r\n")[2]
