"""Typing and pasting in the TUI's prompt."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from scripted_client import answer
from textual.events import Paste
from textual.pilot import Pilot
from tui_chats import Tui, notice_text, play, press

from localgen.backends.errors import InvalidRequest
from localgen.tui.chat import app as chat_app
from localgen.tui.chat.prompt import FOLD_PASTE_CHARS
from localgen.tui.chat.suggestions import Suggestions
from localgen.tui.chat.transcript import Transcript


def test_enter_sends_and_the_answer_stands_there(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"hi there")
        await press(tui, pilot, "enter")
        assert tui.asked == ["hi there"]
        assert tui.prompt.text == ""
        (shown,) = tui.main.query_one(Transcript).shown_turns
        assert shown.turn.answer == "re: hi there"
        assert "re: hi there" in tui.screen_text()
        assert "first token 56 ms" in tui.screen_text()

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
def test_new_lines(tmp_path: Path, key: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("a", key, "b")
        assert tui.prompt.text == "a\nb"
        await press(tui, pilot, "enter")
        assert tui.asked == ["a\nb"]

    play(Tui(tmp_path), scene)


def test_an_empty_prompt_is_not_sent(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "space", "enter")
        assert tui.asked == []

    play(Tui(tmp_path), scene)


def test_a_refused_command_is_replaced_by_typing(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/foo")
        await press(tui, pilot, "enter")
        assert "no command /foo" in tui.screen_text()
        assert tui.prompt.selected_text == tui.prompt.text == "/foo"
        await pilot.press("ctrl+c")
        assert (tui.app.clipboard, tui.prompt.selected_text) == ("/foo", "")
        await press(tui, pilot, "enter")
        await pilot.press(*"/undo")
        assert tui.prompt.text == "/undo"
        assert tui.asked == []

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    "text", ["/usr/bin/x", "/usr/bin/x fails:\nwhy?", "/foo/bar", "/tmp/load is full", "/x/load\nb"]
)
def test_a_path_begins_a_prompt(tmp_path: Path, text: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.prompt.set_text(text)
        await press(tui, pilot, "enter")
        assert tui.asked == [text]

    play(Tui(tmp_path), scene)


def test_history_by_up_and_down(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for text in ("one", "two\nlines"):
            await tui.ask(pilot, text)
        await pilot.press(*"new", "up")
        assert tui.prompt.text == "two\nlines"
        await pilot.press("up")  # to its first line
        await pilot.press("up")
        assert tui.prompt.text == "one"
        await pilot.press("down", "down")
        assert tui.prompt.text == "new"

    play(Tui(tmp_path), scene)


def test_history_outlives_the_program(tmp_path: Path) -> None:
    async def ask(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "before")

    async def recall(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("up")
        assert tui.prompt.text == "before"

    play(Tui(tmp_path), ask)
    play(Tui(tmp_path), recall)


def test_tab_completes_commands(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        suggestions = tui.main.query_one(Suggestions)
        assert not suggestions.display
        await pilot.press(*"/ren")
        await pilot.pause()
        assert suggestions.display
        await pilot.press("tab")
        assert tui.prompt.text == "/rename "
        tui.prompt.set_text("/set parameter temp")
        await pilot.press("tab")
        assert tui.prompt.text == "/set parameter temperature "
        tui.prompt.set_text("no command /x")
        await pilot.pause()
        assert not suggestions.display

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "a line of a log\n" * 6_250], ids=["line", "lines"]
)
def test_a_large_paste_is_folded_and_sent_whole(tmp_path: Path, text: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"see ")
        tui.prompt.post_message(Paste(text))
        await pilot.pause()
        assert tui.prompt.text == "see ⟦paste 1: 100,000 characters⟧"
        await pilot.press("!")
        assert tui.opened.unsent_prompt == f"see {text}!"
        await press(tui, pilot, "enter")
        assert tui.asked == [f"see {text}!"]
        assert "characters more" in tui.screen_text()
        await pilot.press("up")
        assert len(tui.prompt.text) < FOLD_PASTE_CHARS
        assert tui.prompt.full_text == f"see {text}!"

    play(Tui(tmp_path, ("ok", answer())), scene)


def test_backspace_removes_a_folded_paste_as_a_whole(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"see ")
        tui.prompt.post_message(Paste("x" * 5000))
        await pilot.pause()
        await pilot.press("a", "backspace")
        assert tui.prompt.text == "see ⟦paste 1: 5,000 characters⟧"
        await pilot.press("backspace")
        assert tui.prompt.text == "see "
        await pilot.press("backspace")
        assert tui.prompt.text == "see"

    play(Tui(tmp_path), scene)


def test_a_small_paste_stands_as_it_is(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.prompt.post_message(Paste("a\r\nb"))
        await pilot.pause()
        assert tui.prompt.text == "a\nb"

    play(Tui(tmp_path), scene)


def test_editor_edits_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nprintf "%s and more\\n" "$(cat "$1")" > "$1"\n')
    script.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"begun")
        monkeypatch.setenv("EDITOR", os.fspath(script))
        from localgen.tui.chat.editor import edit_in_editor

        assert edit_in_editor("begun") == "begun and more"
        await pilot.press("ctrl+g")  # a test has no terminal to lend
        assert "cannot run an editor" in notice_text(tui)
        assert tui.prompt.text == "begun"

    play(Tui(tmp_path), scene)


def test_the_editor_gives_the_prompt_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(tui.app, "suspend", nullcontext)
        monkeypatch.setattr(chat_app, "edit_in_editor", lambda text: f"{text} and more")
        await pilot.press(*"begun", "ctrl+g")
        assert tui.prompt.text == "begun and more"

        def none(text: str) -> str:
            raise InvalidRequest("cannot start nano")

        monkeypatch.setattr(chat_app, "edit_in_editor", none)
        await pilot.press("ctrl+g")
        assert "cannot start nano" in notice_text(tui)
        assert tui.prompt.text == "begun and more"

    play(Tui(tmp_path), scene)


def test_escapes_that_are_pasted_are_sent_and_never_drawn(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.prompt.post_message(Paste("\x1b[31mred\x9b2J"))
        await pilot.pause()
        assert "\x1b" not in tui.screen_text()
        assert "\x9b" not in tui.screen_text()
        assert "␛[31mred" in tui.screen_text()
        await press(tui, pilot, "enter")
        assert tui.asked == ["\x1b[31mred\x9b2J"]

    play(Tui(tmp_path), scene)
