"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

# no test has a GPU: kernels run in Triton's interpreter, chosen when they are defined
os.environ["TRITON_INTERPRET"] = "1"
# torch and llama.cpp each have threads, which would wait for work by spinning on the same cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hf_folders import TINY

# a shell's background job ignores Ctrl+C, and so would every program that a test starts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder that a test may damage."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))
