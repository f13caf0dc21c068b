"""Jump mode: a letter for each part of the screen."""

from __future__ import annotations

import asyncio
from pathlib import Path

from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Label
from top_script import reading, top_app
from tui_chats import Tui, play, press

from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.transcript import Transcript
from localgen.tui.top.request_table import RequestTable
from localgen.tui.widgets.jump import JumpOverlay


def letters(tui: Tui) -> list[str]:
    assert isinstance(tui.app.screen, JumpOverlay)
    return [str(label.content) for label in tui.app.screen.query(Label)]


def test_a_letter_moves_the_focus(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await press(tui, pilot, "alt+j")
        assert letters(tui) == ["a", "s", "d"]
        assert "Ask something" in tui.screen_text()  # the screen below stays visible
        await press(tui, pilot, "a")
        assert isinstance(tui.app.focused, SessionList)
        await press(tui, pilot, "alt+j", "s")
        assert isinstance(tui.app.focused, Transcript)
        await press(tui, pilot, "alt+j", "d")
        assert isinstance(tui.app.focused, Prompt)
        assert tui.prompt_text == ""

    play(Tui(tmp_path), scene)


def test_other_keys_and_a_new_size_close_it(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for key in ("escape", "z", "f9", "alt+j"):
            await press(tui, pilot, "alt+j")
            assert letters(tui)
            await press(tui, pilot, key)
            assert tui.main.is_shown
        assert isinstance(tui.app.focused, Prompt)
        await press(tui, pilot, "alt+j")
        await pilot.resize_terminal(100, 30)
        await tui.until(lambda: not isinstance(tui.app.screen, JumpOverlay))

    play(Tui(tmp_path), scene)


def test_a_letter_in_the_same_burst_moves_the_focus(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for key in ("x", "alt+j", "a"):
            tui.app.post_message(Key(key, key if len(key) == 1 else None))
        await tui.until(lambda: isinstance(tui.app.focused, SessionList))
        assert tui.main.is_shown
        assert tui.prompt_text == "x"

    play(Tui(tmp_path), scene)


def test_quick_keys_close_it_once(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "alt+j")
        overlay = tui.app.screen
        assert isinstance(overlay, JumpOverlay)
        for key in ("a", "s", "escape"):
            overlay.post_message(Key(key, key))
        await tui.until(lambda: tui.app.screen is not overlay)
        await pilot.pause()
        assert tui.main.is_shown

    play(Tui(tmp_path), scene)


def test_settings_out_of_view_have_no_letter(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t", "alt+j")
        settings = [each for each in letters(tui) if each]
        assert 5 < len(settings) < 15
        await press(tui, pilot, settings[-1])
        assert tui.app.focused is not None
        assert not isinstance(tui.app.focused, Prompt)

    play(Tui(tmp_path), scene, (80, 24))


def test_it_works_in_top() -> None:
    async def run() -> None:
        app = top_app()
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await pilot.press("alt+j")
            assert not isinstance(app.screen, JumpOverlay)  # there is nothing to jump to
            app.sample = reading()
            await pilot.pause()
            app.set_focus(None)
            await pilot.press("alt+j", "a")
            await pilot.pause()
            assert isinstance(app.focused, RequestTable)
            app.set_focus(None)
            await pilot.press("f1", "escape")
            await pilot.pause()
            assert app.focused is None  # not the filter, which is hidden

    asyncio.run(run())
