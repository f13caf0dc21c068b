"""The theme of the screens, and where the choice is stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from top_script import top_app

from localgen.tui.base_app import BaseApp
from localgen.tui.themes import DARK, LIGHT, MONOCHROME, ThemeChoice


def test_f2_takes_the_next_theme_and_it_is_kept(tmp_path: Path) -> None:
    path = BaseApp.theme_file(tmp_path / "state")

    async def play() -> None:
        app = top_app(theme_choice=ThemeChoice(path, {}))
        async with app.run_test() as pilot:
            assert app.theme == DARK
            await pilot.press("f2")
            await pilot.pause()
            assert app.theme == LIGHT

    asyncio.run(play())
    assert json.loads(path.read_text()) == {"theme": LIGHT}
    assert ThemeChoice(path, {}).load() == LIGHT


@pytest.mark.parametrize("content", [b"", b"{", b'{"theme": "pink"}', b"[]", b"\xff\xfe"])
def test_damaged_theme_file_falls_back_to_dark(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tui.json"
    path.write_bytes(content)
    assert ThemeChoice(path, {}).load() == DARK


def test_a_choice_that_cannot_be_kept_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ThemeChoice(tmp_path / "file" / "tui.json", {}).save(LIGHT)
    assert (tmp_path / "file").read_text() == ""


def test_no_color_means_monochrome_and_changes_nothing_that_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tui.json"
    choice = ThemeChoice(path, {"NO_COLOR": "1"})
    assert choice.load() == MONOCHROME
    choice.save(MONOCHROME)
    assert not path.exists()
