"""Imports the scripts in docs/ that generate its pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def docs_script(name: str) -> ModuleType:
    """Import docs/NAME.py, which has PAGE, a path, and page(), its text."""
    path = Path(__file__).parents[1] / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_is_up_to_date(script: ModuleType) -> None:
    """Fail unless the page is what the script writes."""
    if script.PAGE.read_text(encoding="utf-8") != script.page():
        pytest.fail(f"docs/{script.PAGE.name} is older than the code: run `make docs`")
