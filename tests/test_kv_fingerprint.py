"""Two machines have the same namespace for the same model and program, and never for others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from localgen.backends.kv_store import fingerprint
from localgen.backends.kv_store.blocks import DIGEST_BYTES
from localgen.backends.kv_store.fingerprint import (
    contents_fingerprint,
    engine_namespace,
    files_fingerprint,
    namespace_difference,
)

CONTENT = bytes(range(256)) * 4096


def test_small_files_are_known_by_their_content(tmp_path: Path) -> None:
    one, copy = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    one.write_bytes(CONTENT)
    copy.write_bytes(CONTENT)
    os.utime(copy, ns=(1, 1))
    known = files_fingerprint([one])
    assert files_fingerprint([copy]) == known
    for change in (0, len(CONTENT) // 2 + 5, len(CONTENT) - 1):
        edited = bytearray(CONTENT)
        edited[change] ^= 1
        one.write_bytes(edited)
        assert files_fingerprint([one]) != known
    assert files_fingerprint([one, copy]) != files_fingerprint([copy])


def test_large_files_are_known_by_size_time_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SMALL_BYTES", 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    times = path.stat().st_mtime_ns
    seen = {files_fingerprint([path])}
    for content, time_ns in (
        (CONTENT, times + 1),
        (b"\1" + CONTENT[1:], times),
        (CONTENT + b"\0", times),
    ):
        path.write_bytes(content)
        os.utime(path, ns=(times, time_ns))
        seen.add(files_fingerprint([path]))
    assert len(seen) == 4
    copy = tmp_path / "copy.gguf"
    shutil.copy2(path, copy)
    assert files_fingerprint([copy]) in seen, "cp -p keeps times"


@pytest.mark.parametrize("digits", [40, 64])
def test_files_of_the_hub_are_known_by_the_name_of_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: int
) -> None:
    monkeypatch.setattr(fingerprint, "_SMALL_BYTES", 0)

    def pulled(machine: str, digest: str, content: bytes, time_ns: int) -> bytes:
        """The fingerprint of a file in huggingface_hub's layout."""
        blob = tmp_path / machine / "blobs" / digest
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        os.utime(blob, ns=(time_ns, time_ns))
        link = tmp_path / machine / "snapshots" / "abc" / "model.gguf"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path("../../blobs", digest))
        return files_fingerprint([link])

    name, other = "a" * digits, "b" * digits
    known = pulled("one", name, CONTENT, 1)
    assert pulled("two", name, CONTENT, 2) == known
    assert pulled("two", other, CONTENT, 2) != known
    assert pulled("two", name, CONTENT[:-1], 2) != known
    assert pulled("two", name, b"\1" + CONTENT[1:], 2) != known, "edited at its place"
    assert pulled("one", "model", CONTENT, 1) != pulled("two", "model", CONTENT, 2), "no digest"


def test_a_program_is_known_by_what_its_files_contain(tmp_path: Path) -> None:
    def installed(name: str, *contents: bytes) -> bytes:
        folder = tmp_path / name / "lib"
        folder.mkdir(parents=True)
        for number, content in enumerate(contents):
            (folder / f"{name}{number}.so").write_bytes(content)
        return contents_fingerprint(tmp_path / name, pattern="*.so")

    known = installed("one", b"a", b"b")
    assert installed("two", b"b", b"a", b"a") == known, "copies and links add nothing"
    assert installed("three", b"a", b"c") != known
    assert installed("four", b"a") != known
    (tmp_path / "one" / "lib" / "one0.so").write_bytes(b"c")
    assert contents_fingerprint(tmp_path / "one", pattern="*.so") == known, "what runs is the old"


def test_namespaces_differ_in_each_part() -> None:
    parts = (b"m" * 16, b"b" * 16, ("f16", 1))
    known = engine_namespace(*parts)
    assert len(known) == DIGEST_BYTES
    assert engine_namespace(*parts) == known
    others = (
        (b"x" * 16, *parts[1:]),
        (parts[0], b"x" * 16, parts[2]),
        (*parts[:2], ("f16", 2)),
    )
    differences = [namespace_difference(known, engine_namespace(*each)) for each in others]
    assert differences == [
        "another model, or other files of it",
        "another build of the engine",
        "another KV cache type, context or device",
    ]
    # the ids that people see have the first bytes only
    assert len({known[:6], *(engine_namespace(*each)[:6] for each in others)}) == 4
