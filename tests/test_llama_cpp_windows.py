"""Sliding windows that llama.cpp leaves out are told when a file is made and shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_configs import write_config

from localgen.backends.formats.architecture.llama_cpp_windows import (
    gguf_window_note,
    spec_window_note,
)
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.model_files import model_folder
from localgen.hub.metadata import read_metadata


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("mistral window", "24"),
        ("mistral", None),
        ("qwen2", None),
        ("phi3", "24"),
        ("gemma2", None),
        ("gemma3", None),
        ("llama", None),
    ],
)
def test_models_whose_windows_are_lost_are_told(
    name: str, window: str | None, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, name)
    note = spec_window_note(read_hf_config(folder))
    shown = read_metadata(model_folder(folder)).note
    if window is None:
        assert note is shown is None
    else:
        assert note is not None
        assert f"exact within {window} tokens" in note
        assert shown == f"as a GGUF file: {note}"


@pytest.mark.parametrize(
    ("architecture", "window", "context", "lost"),
    [
        ("phi3", 2047, 4096, True),
        ("llama", 4096, 32768, True),
        ("llama", 4096, 4096, False),
        ("llama", None, 4096, False),
        ("gemma3", 512, 32768, False),
        # llama.cpp may compute the windows of architectures that localgen does not know
        ("cohere2", 4096, 32768, False),
        (None, None, None, False),
    ],
)
def test_files_are_told_by_their_metadata(
    architecture: str | None, window: int | None, context: int | None, lost: bool
) -> None:
    assert (gguf_window_note(architecture, window, context) is not None) == lost
