"""Peak memory of a process is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from localgen.backends.memory.system import peak_memory_bytes

MIB = 1 << 20
ASK = "from localgen.backends.memory.system import peak_memory_bytes as peak; print(peak())"


def test_peak_grows_and_does_not_shrink() -> None:
    before = peak_memory_bytes()
    assert before > 10 * MIB
    np.ones(before + 200 * MIB, dtype=np.uint8)
    assert before + 200 * MIB < peak_memory_bytes() < 4 * before + 400 * MIB


def test_child_peak_excludes_the_parents() -> None:
    np.ones(600 * MIB, dtype=np.uint8)
    assert peak_memory_bytes() > 600 * MIB
    child = subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=True)
    assert 5 * MIB < int(child.stdout) < 300 * MIB


def test_without_a_status_file_the_kernel_is_asked(tmp_path: Path) -> None:
    assert peak_memory_bytes(tmp_path / "none") > 10 * MIB
    (tmp_path / "other").write_text("Name:\tpython\n")
    assert peak_memory_bytes(tmp_path / "other") > 10 * MIB
    (tmp_path / "own").write_text("Name:\tpython\nVmHWM:\t    2048 kB\n")
    assert peak_memory_bytes(tmp_path / "own") == 2 * MIB
