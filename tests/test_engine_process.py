"""The environment in which an engine process starts."""

from __future__ import annotations

import sys

import pytest

from localgen.server.models.engine_process import EngineProcess

_SHOW = "import os; print(os.environ['GLIBC_TUNABLES'])"


@pytest.mark.parametrize(
    ("known", "then"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_are_asked_for_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, known: str, then: str
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", known)
    started = EngineProcess.start([sys.executable, "-c", _SHOW])
    said, _ = started.process.communicate(timeout=30)
    started.sock.close()
    assert said.decode().strip() == then
