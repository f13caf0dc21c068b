"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# no test has a GPU: kernels run in Triton's interpreter, chosen when they are defined
os.environ["TRITON_INTERPRET"] = "1"
# torch and llama.cpp each have threads, which would wait for work by spinning on the same cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hf_folders import TINY

if TYPE_CHECKING:
    from llama_files import LlamaFile

# a shell's background job ignores Ctrl+C, and so would every program that a test starts
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from llama_files import LlamaFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder that a test may damage."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


@pytest.fixture
def open_model() -> Iterator[Callable[..., LlamaFile]]:
    """Opens GGUF files in llama.cpp, and closes them."""
    from llama_files import LlamaFile

    opened: list[LlamaFile] = []

    def open_one(path: Path, **options: bool) -> LlamaFile:
        opened.append(LlamaFile(path, **options))
        return opened[-1]

    yield open_one
    for model in opened:
        model.close()
