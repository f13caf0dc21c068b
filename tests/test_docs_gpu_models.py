"""docs/gpu-models.md is up to date with the catalog and the engine."""

from __future__ import annotations

from types import ModuleType

import pytest
from docs_scripts import check_is_up_to_date, docs_script

from localgen.hub.catalog import catalog_entries


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("gpu_models")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    check_is_up_to_date(script)


def test_every_model_of_the_catalog_has_a_row(script: ModuleType) -> None:
    rows = [line for line in script.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [entry.alias for entry in catalog_entries()]
    for row in rows:
        _, _, runs, formats, missing, _ = (cell.strip() for cell in row.split("|"))
        assert runs in ("yes", "no")
        assert bool(formats) == (runs == "yes")
        assert missing or runs == "yes"
