"""docs/cli.md is up to date with the commands."""

from __future__ import annotations

from types import ModuleType

import pytest
from docs_scripts import check_is_up_to_date, docs_script

from localgen.cli.commands import COMMANDS


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("cli")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    check_is_up_to_date(script)


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
