"""What several test files need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_gguf() -> Path:
    """The built-in model."""
    path = Path(__file__).parents[1] / "localgen/models/tiny.gguf"
    assert path.is_file(), "the built-in model is missing: run ./setup.sh or pip install -e ."
    return path
