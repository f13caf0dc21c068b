"""What identifies a model's files and the program that computes with them.

Two machines with the same model and program get the same, wherever their files are.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from localgen.backends.kv_store.blocks import DIGEST_BYTES, namespace_of

# larger files are not read whole: their size, time, and content in this many places
_SMALL_BYTES = 128 << 20
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096
# in the cache of the hub, a file is a link to its content, whose name is a SHA-256 or git's SHA-1
_CONTENT_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# of a namespace, for the model and for the build; the rest covers everything
_PART_BYTES = 4


def files_fingerprint(paths: Iterable[Path]) -> bytes:
    """Digest of a model's files. Raises OSError.

    Files in the hub's cache and small ones are known by their content, others by size, time of
    modification, and samples.
    """
    return namespace_of([part for path in sorted(paths) for part in _file_parts(path)])


def _file_parts(path: Path) -> list[str | bytes | int]:
    content = path.resolve()
    size = content.stat().st_size
    is_named = content.parent.name == "blobs" and _CONTENT_NAME.fullmatch(content.name) is not None
    if size <= _SMALL_BYTES and not is_named:
        return [_content_digest(content)]
    # samples of named content too, in case somebody has edited it
    parts: list[str | bytes | int] = [content.name if is_named else content.stat().st_mtime_ns]
    with content.open("rb") as file:
        for index in range(_NUM_SAMPLES):
            file.seek(index * max(_SAMPLE_BYTES, size // _NUM_SAMPLES))
            parts.append(file.read(_SAMPLE_BYTES))
    return [size, *parts]


def _content_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@functools.cache
def contents_fingerprint(*folders: Path, pattern: str = "*") -> bytes:
    """Digest of what the files in folders contain, however they are named. Raises OSError.

    Each process reads them once: it goes on with what it has loaded.
    """
    files = (path for folder in folders for path in folder.rglob(pattern) if path.is_file())
    return namespace_of(sorted({_content_digest(path) for path in files}))


def engine_namespace(model: bytes, build: bytes, settings: Sequence[str | bytes | int]) -> bytes:
    """Digest of all that keys and values depend on besides the tokens.

    model, build: fingerprints of the model's files and of the program. settings: options.
    """
    whole = namespace_of((model, build, *settings))
    return whole[: DIGEST_BYTES - 2 * _PART_BYTES] + model[:_PART_BYTES] + build[:_PART_BYTES]


def namespace_difference(ours: bytes, theirs: bytes) -> str:
    """Say in which part another engine's namespace differs: model, build or settings."""
    if len(theirs) != DIGEST_BYTES:
        return "another version of localgen"
    differs = [
        ours[at : at + _PART_BYTES] != theirs[at : at + _PART_BYTES]
        for at in range(DIGEST_BYTES - 2 * _PART_BYTES, DIGEST_BYTES, _PART_BYTES)
    ]
    names = ("another model, or other files of it", "another build of the engine")
    found = [name for name, is_other in zip(names, differs, strict=True) if is_other]
    return " and ".join(found) or "another KV cache type, context or device"
