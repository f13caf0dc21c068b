"""docs/gpu-models.md is up to date with the catalog and the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from localgen.hub.catalog import catalog_entries

SCRIPT = Path(__file__).parents[1] / "docs" / "gpu_models.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_gpu_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    if script.PAGE.read_text(encoding="utf-8") != script.page():
        pytest.fail("docs/gpu-models.md is older than the code: run `make docs`")


def test_every_model_of_the_catalog_has_a_row(script: ModuleType) -> None:
    rows = [line for line in script.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [entry.alias for entry in catalog_entries()]
    for row in rows:
        _, _, runs, formats, missing, _ = (cell.strip() for cell in row.split("|"))
        assert runs in ("yes", "no")
        assert bool(formats) == (runs == "yes")
        assert missing or runs == "yes"
