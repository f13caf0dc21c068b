"""Turns of a session: restored, written by two programs, drawn where visible."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import Tui, notice_text, play, press

from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import SessionRecord
from localgen.tui.chat.transcript import Transcript


@pytest.mark.parametrize("line", ["/clear", "/undo 2", "/undo", "/compact"])
def test_f9_restores_removed_turns(tmp_path: Path, line: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for text in "ab":
            await tui.ask(pilot, text * 200)
        before = tui.opened.chat.conversation
        await tui.ask(pilot, line)
        await tui.until(lambda: "F9 undoes it" in tui.screen_text())
        assert tui.opened.chat.conversation.turns != before.turns
        await press(tui, pilot, "f9")
        assert tui.opened.chat.conversation == before
        assert tui.store.read(tui.opened.id).conversation == before
        copies = [each for each in tui.store.list_sessions() if each.forked_from == tui.opened.id]
        assert len(copies) == (line == "/compact")
        assert all(tui.store.read(each.id).conversation == before for each in copies)

    play(Tui(tmp_path), scene)


def test_a_summary_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "a")
        before = tui.opened.chat.conversation
        await tui.type(pilot, "/compact")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.running_command)
        await pilot.pause()
        assert "/compact" in tui.screen_text()
        await pilot.press("ctrl+c")
        await tui.until(lambda: notice_text(tui) == "stopped")
        assert tui.opened.chat.conversation == before
        await tui.ask(pilot, "b")
        assert len(tui.opened.chat.conversation.turns) == 2

    play(Tui(tmp_path, ("A.", answer()), ("Half", gate, answer()), ("B.", answer())), scene)


def test_turns_that_come_back_take_nothing_away(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "a")
        session = tui.opened.id
        await tui.ask(pilot, "/clear")
        await tui.until(lambda: "F9 undoes it" in tui.screen_text())
        await tui.ask(pilot, "b")
        await press(tui, pilot, "f9")
        await tui.until(lambda: tui.opened.id != session)
        assert [turn.prompt for turn in tui.opened.chat.conversation.turns] == ["a"]
        assert [turn.prompt for turn in tui.store.read(session).conversation.turns] == ["b"]

    play(Tui(tmp_path), scene)


def test_a_conflict_leaves_the_user_where_he_is(tmp_path: Path) -> None:
    other = Tui(tmp_path)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        mine, session = tui.opened, tui.opened.id
        theirs = other.manager.get(session)
        theirs.ask("theirs")
        assert theirs.last_stream is not None
        await tui.until(theirs.last_stream.ended.is_set)
        theirs.finalize_answer()
        mine.apply_setting("temperature", "0.5")  # it was not seen yet
        assert mine.id != session
        await tui.until(lambda: mine.id in [listed.id for listed in tui.manager.summaries])
        await tui.wait_until_idle(pilot)
        assert tui.opened is mine
        assert tui.manager.active_by_id[mine.id] is mine
        assert "continues as 'one (2)'" in notice_text(tui)
        await press(tui, pilot, "ctrl+l", "down", "enter")
        await tui.until(lambda: tui.opened.id == session)
        assert [t.prompt for t in tui.opened.chat.conversation.turns] == ["one", "theirs"]

    try:
        play(Tui(tmp_path), scene)
    finally:
        other.close()


def test_going_to_an_early_turn_draws_only_what_is_near(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        turns = tuple(Turn(f"prompt {number}", "a") for number in range(60))
        made = tui.store.create(
            SessionRecord(0, name="long", conversation=Conversation(None, turns))
        )
        await tui.app.session_actions.open(made.id)
        transcript = tui.main.query_one(Transcript)
        transcript.scroll_to_turn(3)
        await pilot.pause()
        assert "prompt 3" in tui.screen_text()
        assert len(transcript.shown_turns) < 20
        assert "later turns: Ctrl+End shows them" in transcript.text
        transcript.sync()
        assert len(transcript.shown_turns) < 20
        await press(tui, pilot, "ctrl+end")
        assert "prompt 59" in tui.screen_text()
        transcript.scroll_to_turn(3)
        await tui.ask(pilot, "new")  # an answer is shown wherever one was
        assert "re: new" in tui.screen_text()
        assert "prompt 59" in tui.screen_text()
        assert len(transcript.shown_turns) < 20

    play(Tui(tmp_path), scene)


def test_a_summary_is_not_regenerated_without_its_turns(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "a" * 400)
        await tui.ask(pilot, "/compact")
        await tui.until(lambda: "became a summary" in tui.screen_text())
        summary = tui.opened.chat.conversation
        await press(tui, pilot, "ctrl+r")
        await tui.until(lambda: "it cannot be written again" in notice_text(tui))
        assert tui.opened.chat.conversation == summary

    play(Tui(tmp_path), scene)
