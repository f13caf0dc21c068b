"""The user's own keys, differences of answers, and what the terminal is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from tui_chats import Tui, play

from localgen.tui.chat.app import ChatApp
from localgen.tui.chat.differences import marked_answers
from localgen.tui.key_file import key_file_path, names_of, read_key_file
from localgen.tui.terminal_signals import TerminalSignals
from localgen.tui.top.app import TopApp


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path))
    return key_file_path()


def test_keys_are_read_from_the_file(tmp_path: Path, key_file: Path) -> None:
    key_file.write_text('[tui]\nnew = ["f11", "alt+n"]\nnonsense = "x"\n')

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        (problem,) = [each.message for each in tui.app._notifications]
        assert "[tui] no action nonsense" in problem
        await tui.ask(pilot, "one")
        first = tui.opened
        await pilot.press("alt+n")
        await tui.until(lambda: tui.opened is not first)
        await tui.ask(pilot, "two")
        second = tui.opened
        await pilot.press("ctrl+n")
        await pilot.pause()
        assert tui.opened is second

    play(Tui(tmp_path), scene)


def test_what_is_wrong_is_said(key_file: Path) -> None:
    assert read_key_file("tui", {"new"}) == read_key_file("top", set())  # no file
    key_file.write_text("[tui")
    assert "correct it or remove it" in read_key_file("tui", {"new"}).problem
    key_file.write_text('[tui]\nnew = 5\nold = "ctrl+k"\n[top]\nsort = "o"\n')
    found = read_key_file("tui", {"new", "old"}, {"ctrl+k"})
    assert found.keys == {}
    assert "new: give a key" in found.problem
    assert "old: ctrl+k edits the prompt" in found.problem
    assert read_key_file("top", {"sort"}).keys == {"sort": "o"}
    key_file.write_text('[tui]\nnew = ["ctrl+e", "nosuchkey"]\nold = "alt+question_mark"\n[bad]\n')
    found = read_key_file("tui", {"new", "old"})
    assert found.keys == {"old": "alt+question_mark"}
    assert "new: there is no key nosuchkey" in found.problem
    assert "no table [bad]" in found.problem


@pytest.mark.parametrize("app", [ChatApp, TopApp])
def test_actions_have_plain_names(app: type[ChatApp | TopApp]) -> None:
    names = names_of(*app.KEY_OWNERS)
    assert len(names) > 10
    assert all(name.isidentifier() for name in names)


def test_words_that_differ_are_lit() -> None:
    first, second, third = marked_answers(["one two  three", "one 2  three", "one two  three"])
    assert [first.plain, second.plain] == ["one two  three", "one 2  three"]
    lit = [[each.plain[span.start : span.end] for span in each.spans] for each in (first, second)]
    assert lit == [["two"], ["2"]]
    assert third.spans == []


def test_the_title_comes_back() -> None:
    written: list[str] = []
    signals = TerminalSignals(written.append)
    signals.set_title("a\x1b]b")
    signals.set_title("a\x1b]b")
    signals.notify("done")
    signals.restore_title()
    signals.restore_title()
    assert written == ["\x1b[22;2t\x1b]2;a\\x1b]b\x07", "\x07\x1b]9;done\x07", "\x1b[23;2t"]
