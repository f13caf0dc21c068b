"""The theme of the screens, and where the choice is stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from top_script import top_app

from localgen.tui.base_app import BaseApp
from localgen.tui.preferences import Preferences
from localgen.tui.themes import DARK, LIGHT, MONOCHROME
from localgen.tui.top.request_rows import REQUEST_COLUMNS
from localgen.tui.top.request_table import RequestTable


def test_f2_takes_the_next_theme_and_it_is_kept(tmp_path: Path) -> None:
    path = BaseApp.preferences_file(tmp_path / "state")

    async def play() -> None:
        app = top_app(preferences=Preferences(path, {}))
        async with app.run_test() as pilot:
            assert app.theme == DARK
            await pilot.press("f2")
            await pilot.pause()
            assert app.theme == LIGHT

    asyncio.run(play())
    assert json.loads(path.read_text()) == {"theme": LIGHT}
    assert Preferences(path, {}).theme() == LIGHT


@pytest.mark.parametrize("content", [b"", b"{", b'{"theme": "pink"}', b"[]", b"\xff\xfe"])
def test_damaged_theme_file_falls_back_to_dark(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tui.json"
    path.write_bytes(content)
    assert Preferences(path, {}).theme() == DARK


def test_a_choice_that_cannot_be_kept_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Preferences(tmp_path / "file" / "tui.json", {}).save_theme(LIGHT)
    assert (tmp_path / "file").read_text() == ""


def test_no_color_means_monochrome_and_changes_nothing_that_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tui.json"
    preferences = Preferences(path, {"NO_COLOR": "1"})
    assert preferences.theme() == MONOCHROME
    preferences.save_theme(MONOCHROME)
    assert not path.exists()


def test_hidden_columns_are_kept_beside_the_theme(tmp_path: Path) -> None:
    path = tmp_path / "tui.json"
    Preferences(path, {}).save_theme(LIGHT)

    async def play() -> None:
        app = top_app(preferences=Preferences(path, {}))
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("o")
            await pilot.pause()
            await pilot.press("space", "enter")
            await pilot.pause()

    asyncio.run(play())
    hidden = Preferences(path, {}).hidden_columns()
    assert hidden == {REQUEST_COLUMNS[1].key}
    assert Preferences(path, {}).theme() == LIGHT

    async def play_again() -> None:
        app = top_app(preferences=Preferences(path, {}))
        async with app.run_test(size=(120, 40)):
            assert app.screen.query_one(RequestTable).hidden_columns == hidden

    asyncio.run(play_again())


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"hidden_columns": 3}', b'{"hidden_columns": [3]}']
)
def test_damaged_columns_hide_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tui.json"
    path.write_bytes(content)
    assert Preferences(path, {}).hidden_columns() == frozenset()
