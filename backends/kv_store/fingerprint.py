"""What identifies a model's files and the program that computes with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from localgen.backends.kv_store.blocks import namespace_of

# whole files of tens of GB are not read: their size, time, and content in this many places
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096


def files_fingerprint(paths: Iterable[Path]) -> bytes:
    """Digest of files by size, time of modification, and samples. Raises OSError."""
    parts: list[bytes | int] = []
    for path in sorted(paths):
        found = path.stat()
        parts += [found.st_size, found.st_mtime_ns]
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                file.seek(index * max(_SAMPLE_BYTES, found.st_size // _NUM_SAMPLES))
                parts.append(file.read(_SAMPLE_BYTES))
    return namespace_of(parts)
