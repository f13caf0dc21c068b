"""Repository paths and links in the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TOP_LEVEL = "backends|benchmarks|docs|localgen|quant|tests|tui"
PATH = re.compile(rf"`((?:{TOP_LEVEL})/[\w./-]*)`")
BARE_FILE = re.compile(r"`(\w+\.py)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)\s]+))?\)")
# files that programs create
CREATED = {"localgen/server.sock", "benchmarks/results/gpu-NAME-DATE.json"}
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def heading_anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (path in CREATED or (ROOT / path).exists())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_without_a_folder_exist(page: Path) -> None:
    known = {path.name for folder in TOP_LEVEL.split("|") for path in (ROOT / folder).rglob("*.py")}
    assert set(BARE_FILE.findall(page.read_text(encoding="utf-8"))) - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        linked = (page.parent / target).resolve()
        assert linked.exists(), target
        assert not anchor or anchor in heading_anchors(linked), f"{target}#{anchor}"


def test_tests_named_for_vulnerabilities_exist() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    table = page.split("## Known vulnerabilities")[1]
    named = re.findall(r"`(test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)", table)
    assert len(named) > 20
    for file, tests in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        for test in re.findall(r"`(test_\w+)`", tests):
            assert f"def {test}(" in source, f"{file}: {test}"


def test_every_page_is_linked_in_the_readme() -> None:
    linked = {target for target, _ in LINK.findall(PAGES[0].read_text(encoding="utf-8"))}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()


def test_a_missing_path_is_found() -> None:
    assert PATH.findall("see `backends/no_such_file.py` and `backends/`") == [
        "backends/no_such_file.py",
        "backends/",
    ]
