"""docs/cli.md is up to date with the commands."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from localgen.cli.commands import COMMANDS

SCRIPT = Path(__file__).parents[1] / "docs" / "cli.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_cli", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    there = script.PAGE.read_text(encoding="utf-8")
    if there != script.page():
        pytest.fail("docs/cli.md is older than the commands: run `make docs` (python docs/cli.py)")


def test_every_command_has_its_section(script: ModuleType) -> None:
    page = script.page()
    for name in COMMANDS:
        assert f"\n## localgen {name}\n\n    localgen {name} " in page


def test_options_variables_and_exit_statuses_are_documented(script: ModuleType) -> None:
    page = script.page()
    assert "- `-c, --ctx <int>` " in page
    assert "`LOCALGEN_CTX`" in page
    assert "- `--port <int>` " in page
    assert "17 download failed" in page
