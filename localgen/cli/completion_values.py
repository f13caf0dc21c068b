"""What may stand where the cursor is: names and values for the shell's completion.

Nothing here starts a server, asks the network or loads a library: a shell waits for it at each
press of a key.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from localgen.backends.errors import LocalgenError

# how long a server that is busy may keep a shell waiting
_SERVER_TIMEOUT_S = 0.15
# what shells do not take apart; an odd name can still be typed
_SAFE_NAME = re.compile(r"[\w.:/@+~-]+", re.ASCII)
_PATH_PREFIXES = ("/", "./", "../", "~")

CACHE_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    *("int8", "fp8"),
)
# options whose values are known, by field
_OPTION_VALUES = {
    "cache_type_k": CACHE_TYPES,
    "cache_type_v": CACHE_TYPES,
    "device": ("cpu", "cuda", "cuda:0"),
    "keep_alive": ("30s", "5m", "1h", "0", "-1"),
}
# options whose value may be @FILE
_FILE_OPTIONS = ("json_schema", "regex", "grammar")

Completer = Callable[[str], list[str]]


def option_completer(field: str) -> Completer | None:
    """What completes the values of an option; None: nothing is known of them."""
    if field in _FILE_OPTIONS:
        return _complete_at_file
    if field == "draft":
        return _complete_draft
    values = _OPTION_VALUES.get(field)
    return None if values is None else lambda incomplete: _filter_by_prefix(incomplete, values)


def complete_model(incomplete: str) -> list[str]:
    """Whatever can be run: what is here, then what could be fetched, or .gguf files."""
    if incomplete.startswith(_PATH_PREFIXES):
        return complete_path(incomplete, ".gguf")
    names = [*_local_names(), *_catalog_names(incomplete)]
    return _filter_by_prefix(incomplete, names) or complete_path(incomplete, ".gguf")


def _complete_draft(incomplete: str) -> list[str]:
    """What `--draft` may be: a word, or a model."""
    words = _filter_by_prefix(incomplete, ("ngram", "auto", "none"))
    return words + [name for name in complete_model(incomplete) if name not in words]


def complete_catalog_model(incomplete: str) -> list[str]:
    """Models that can be fetched."""
    return _filter_by_prefix(incomplete, [*_catalog_names(incomplete), *_cached_names()])


def complete_removable_model(incomplete: str) -> list[str]:
    """Models of the cache and names that the user gave."""
    return _filter_by_prefix(incomplete, [*_cached_names(), *_alias_names()])


def complete_running_model(incomplete: str) -> list[str]:
    """Models that are loaded."""
    return _filter_by_prefix(incomplete, _running_names())


def complete_path(incomplete: str, suffix: str = "") -> list[str]:
    """Folders, with a / at the end, and files of that suffix, spelled as they were begun."""
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
    """Those that begin so, in any case of letters, spelled as far as they were typed."""
    begun = incomplete.lower()
    known = dict.fromkeys(name for name in names if name.lower().startswith(begun))
    spelled = [incomplete + name[len(incomplete) :] for name in known]
    return [name for name in spelled if _SAFE_NAME.fullmatch(name)]


def _local_names() -> Iterator[str]:
    from localgen.hub.resolve import BUILT_IN_MODEL

    yield BUILT_IN_MODEL
    yield from _alias_names()
    yield from _cached_names()
    yield from _running_names()


def _alias_names() -> Iterator[str]:
    from localgen.hub.aliases import load_aliases

    try:
        yield from load_aliases()
    except LocalgenError:
        return  # the command that is run says what is wrong with the file


def _cached_names() -> Iterator[str]:
    from localgen.hub.cache_scan import cached_names

    try:
        yield from cached_names()
    except OSError:
        return


def _catalog_names(incomplete: str) -> Iterator[str]:
    """Every name of the catalog; behind one and a colon its quantizations."""
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
        return  # there is no server, or it has no time


def _fetch_stats() -> bytes:
    """What the server of this user says of its models; libraries for HTTP take long to load."""
    from localgen.config import ServerSettings

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_SERVER_TIMEOUT_S)
        sock.connect(str(ServerSettings.from_environment().socket_path))
        sock.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: localgen\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return reply.partition(b"\r\n\r\n")[2]
