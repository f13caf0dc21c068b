"""Keys that are the same everywhere in the TUI: help, palette, themes; and long texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input
from tui_chats import Tui, notice_text, play, press

from localgen.chat import parameters
from localgen.tui.base_app import KeyHelp, TerminalTooSmall
from localgen.tui.chat.compare import CompareDialog
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.text_dialog import TextInputDialog
from localgen.tui.themes import THEME_NAMES
from localgen.tui.widgets.command_palette import CommandPalette
from localgen.tui.widgets.dialog import ConfirmDialog, ScrollableTextDialog


def test_every_key_is_in_the_help(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        keys = dict(tui.app._key_help_rows(tui.main))  # type: ignore[arg-type]
        for binding in (*tui.app.BINDINGS, *tui.main.BINDINGS, *tui.prompt.BINDINGS):
            shown = tui.app.get_key_display(binding)  # type: ignore[arg-type]
            assert any(shown.split(",")[0] in key for key in keys), binding

        await pilot.press("f1")
        await tui.until(lambda: isinstance(tui.app.screen, KeyHelp))

    play(Tui(tmp_path), scene)


def test_a_small_terminal_loses_nothing(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"typed")
        await pilot.resize_terminal(50, 15)
        await pilot.pause()
        assert isinstance(tui.app.screen, TerminalTooSmall)
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert tui.main.is_active
        assert tui.prompt.text == "typed"

    play(Tui(tmp_path), scene)


def test_a_question_mark_asks_for_the_keys_where_nothing_is_typed(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("?")
        assert isinstance(tui.app.screen, KeyHelp)
        assert tui.prompt_text == ""
        await pilot.press("?")
        assert tui.main.is_active
        await pilot.press(*"why?")
        assert tui.main.is_active
        assert tui.prompt_text == "why?"

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    ("keys", "screen", "says"),
    [
        (("f3",), TextInputDialog, "Cancel"),
        (("f8",), ConfirmDialog, "Yes"),
        (("ctrl+o",), ModelPicker, "Stop, or close"),
        (("ctrl+f",), SearchScreen, "Close"),
        (("ctrl+b",), CompareDialog, "Compare these"),
    ],
)
def test_f1_tells_the_keys_of_a_dialog_and_takes_itself_away(
    tmp_path: Path, keys: tuple[str, ...], screen: type, says: str
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, *keys)
        await tui.until(lambda: isinstance(tui.app.screen, screen))
        await pilot.press("f1")
        await pilot.pause()
        assert isinstance(tui.app.screen, KeyHelp)
        assert says in tui.screen_text()
        assert "/rename" not in tui.screen_text()  # nothing of prompts
        await pilot.press("f1")
        await pilot.pause()
        assert isinstance(tui.app.screen, screen)

    play(Tui(tmp_path), scene)


def test_a_question_mark_is_typed_where_a_text_is_asked_for(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "f3", "?")
        assert tui.app.screen.query_one(Input).value.endswith("?")
        await press(tui, pilot, "escape", "f8", "?")
        assert isinstance(tui.app.screen, KeyHelp)  # nothing is typed into a question

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("key", ["escape", "q", "enter"])
def test_keys_that_close_the_help(tmp_path: Path, key: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("f1", key)
        await pilot.pause()
        assert tui.main.is_active
        assert tui.prompt.has_focus

    play(Tui(tmp_path), scene)


def test_f2_takes_the_next_theme(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        assert tui.app.theme == THEME_NAMES[0]
        for name in (*THEME_NAMES[1:], THEME_NAMES[0]):
            await pilot.press("f2")
            assert tui.app.theme == name

    play(Tui(tmp_path), scene)


def test_the_palette_does_what_it_names(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+p")
        await tui.until(lambda: isinstance(tui.app.screen, CommandPalette))
        await pilot.press(*"Rename the")
        await tui.until(lambda: re.search(r"Rename the session +f3", tui.screen_text()))
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, TextInputDialog))

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (200, 60)])
def test_a_long_text_can_be_read_to_its_end(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "/show parameters")
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, ScrollableTextDialog))
        await pilot.pause()
        assert "/show parameters" in tui.screen_text()
        assert parameters.PARAMETER_NAMES[0] in tui.screen_text()
        await pilot.press("end")
        await pilot.pause(0.5)
        assert parameters.PARAMETER_NAMES[-1] in tui.screen_text()
        await pilot.press("escape")
        await pilot.pause()
        assert tui.main.is_active
        assert tui.prompt.has_focus
        assert notice_text(tui) == ""

    play(Tui(tmp_path), scene, size)


def test_notices_leave_room_for_the_conversation(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.app.show_message("a line\n" * 5 + "the last")
        await pilot.pause()
        assert "the last" in tui.screen_text()
        assert tui.main.is_active
        tui.app.show_message("a line\n" * 8 + "the last")
        await pilot.pause()
        assert isinstance(tui.app.screen, ScrollableTextDialog)

    play(Tui(tmp_path), scene, (80, 24))
