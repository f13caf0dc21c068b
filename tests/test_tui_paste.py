"""Text pasted outside the prompt is never drawn as control sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_client import answer
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Input, TextArea
from tui_chats import Tui, play, press

from localgen.tui.chat.compare import CompareDialog
from localgen.tui.chat.settings import SettingsPanel

PASTED = "\x1b]0;owned\x07\x1b[2J\x9b31m red"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m red"
IN_AN_AREA = "␛]0;owned␇␛[2J\ufffd31m red"  # a symbol for each


async def paste(tui: Tui, pilot: Pilot[None]) -> None:
    """Send a paste as a driver does."""
    tui.app.post_message(Paste(PASTED))
    await tui.until(lambda: IN_AN_AREA in tui.screen_text(), 20)
    shown = tui.screen_text()
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_paste_into_the_system_prompt_is_inert(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        field = tui.main.query_one(SettingsPanel).query_one(TextArea)
        field.focus()
        await pilot.pause()
        await paste(tui, pilot)
        await press(tui, pilot, "escape")
        assert tui.opened.chat.conversation.system == PASTED
        await press(tui, pilot, "ctrl+t")
        assert IN_AN_AREA in tui.screen_text()
        assert "\x1b" not in tui.screen_text()
        field.focus()
        await press(tui, pilot, "escape")  # to have looked at it changes nothing
        assert tui.opened.chat.conversation.system == PASTED

    play(Tui(tmp_path), scene)


def test_paste_into_a_comparison_is_inert(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+b")
        await tui.until(lambda: isinstance(tui.app.screen, CompareDialog))
        await pilot.pause()
        await paste(tui, pilot)

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("key", ["ctrl+t", "ctrl+f", "ctrl+s", "ctrl+o"])
def test_paste_into_an_input_is_inert(tmp_path: Path, key: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        await tui.until(lambda: isinstance(tui.app.focused, Input))
        assert isinstance(tui.app.focused, Input)
        tui.app.focused.value = ""
        tui.app.post_message(Paste(f"{PASTED}\rmore"))  # as a terminal sends a line end
        await pilot.pause()
        assert tui.app.focused.value == SHOWN
        assert not {"\x1b", "\x07", "\x9b"} & set(tui.screen_text())

    play(Tui(tmp_path), scene, (200, 60))


def test_copied_text_is_the_shown_text(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await pilot.press("ctrl+y", "ctrl+f")
        await tui.until(lambda: isinstance(tui.app.focused, Input))
        await pilot.press("ctrl+v")
        assert isinstance(tui.app.focused, Input)
        assert tui.app.focused.value == SHOWN

    play(Tui(tmp_path, (PASTED, answer())), scene)
