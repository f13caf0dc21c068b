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
_SERVER_S = 0.15
# what shells do not take apart; an odd name can still be typed
_PLAIN = re.compile(r"[\w.:/@+~-]+", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")

CACHE_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    *("int8", "fp8"),
)
# options whose values are known, by field
_VALUES = {
    "cache_type_k": CACHE_TYPES,
    "cache_type_v": CACHE_TYPES,
    "device": ("cpu", "cuda", "cuda:0"),
    "keep_alive": ("30s", "5m", "1h", "0", "-1"),
}
# options whose value may be @FILE
_TEXTS_OR_FILES = ("json_schema", "regex", "grammar")

Candidates = Callable[[str], list[str]]


def of_option(field: str) -> Candidates | None:
    """What completes the values of an option; None: nothing is known of them."""
    if field in _TEXTS_OR_FILES:
        return _file_behind_at
    if field == "draft":
        return _drafter
    values = _VALUES.get(field)
    return None if values is None else lambda incomplete: _starting(incomplete, values)


def any_model(incomplete: str) -> list[str]:
    """Whatever can be run: what is here, then what could be fetched, or .gguf files."""
    if incomplete.startswith(_PATH_STARTS):
        return paths(incomplete, ".gguf")
    names = [*_here(), *_of_catalog(incomplete)]
    return _starting(incomplete, names) or paths(incomplete, ".gguf")


def _drafter(incomplete: str) -> list[str]:
    """What `--draft` may be: a word, or a model."""
    words = _starting(incomplete, ("ngram", "auto", "none"))
    return words + [name for name in any_model(incomplete) if name not in words]


def catalog_model(incomplete: str) -> list[str]:
    """Models that can be fetched."""
    return _starting(incomplete, [*_of_catalog(incomplete), *_cached()])


def removable_model(incomplete: str) -> list[str]:
    """Models of the cache and names that the user gave."""
    return _starting(incomplete, [*_cached(), *_given()])


def running_model(incomplete: str) -> list[str]:
    """Models that are loaded."""
    return _starting(incomplete, _running())


def paths(incomplete: str, suffix: str = "") -> list[str]:
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


def _file_behind_at(incomplete: str) -> list[str]:
    return [f"@{path}" for path in paths(incomplete[1:])] if incomplete.startswith("@") else []


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    """Those that begin so, in any case of letters, spelled as far as they were typed."""
    begun = incomplete.lower()
    known = dict.fromkeys(name for name in names if name.lower().startswith(begun))
    spelled = [incomplete + name[len(incomplete) :] for name in known]
    return [name for name in spelled if _PLAIN.fullmatch(name)]


def _here() -> Iterator[str]:
    from localgen.hub.resolve import BUILT_IN

    yield BUILT_IN
    yield from _given()
    yield from _cached()
    yield from _running()


def _given() -> Iterator[str]:
    from localgen.hub.aliases import aliases

    try:
        yield from aliases()
    except LocalgenError:
        return  # the command that is run says what is wrong with the file


def _cached() -> Iterator[str]:
    from localgen.hub.cache_scan import cached_names

    try:
        yield from cached_names()
    except OSError:
        return


def _of_catalog(incomplete: str) -> Iterator[str]:
    """Every name of the catalog; behind one and a colon its quantizations."""
    from localgen.hub import catalog
    from localgen.hub.quants import AUTO

    yield from (entry.alias for entry in catalog.entries())
    for entry in catalog.entries():
        yield from entry.names
    head, colon, _ = incomplete.rpartition(":")
    found = catalog.find(head) if colon else None
    if found is not None:
        yield from (f"{head}:{tag}" for tag in (AUTO, *found[0].gguf.sizes))


def _running() -> Iterator[str]:
    try:
        yield from (str(model["name"]) for model in json.loads(_stats())["models"])
    except (OSError, LocalgenError, ValueError, KeyError, TypeError):
        return  # there is no server, or it has no time


def _stats() -> bytes:
    """What the server of this user says of its models; libraries for HTTP take long to load."""
    from localgen.config import Settings

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_SERVER_S)
        sock.connect(str(Settings.from_environment().socket_path))
        sock.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: localgen\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return reply.partition(b"\r\n\r\n")[2]
