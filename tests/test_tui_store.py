"""Stored sessions with killed programs, several programs at once, and a full disk."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import MakeTui, Tui, notice_text, play, press, turns, wait, wait_for_answer

from localgen.backends.errors import DiskFull
from localgen.chat.conversation import Turn
from localgen.chat.database import SESSIONS_SCHEMA
from localgen.chat.session_store import (
    INTERRUPTED_SUMMARY,
    SessionBusy,
    SessionChanged,
    SessionRecord,
    SessionStore,
)
from localgen.tui.chat.main_screen import session_status


def test_an_answer_outlives_a_program_that_is_killed_while_it_asks_again(make_tui: MakeTui) -> None:
    tui, other = make_tui(("good", answer()), ("half", threading.Event())), make_tui()
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait_for_answer(tui, opened)
    opened.regenerate()
    wait(lambda: opened.answer_stream and opened.answer_stream.num_tokens)
    tui.manager.sync_store()
    tui.writer._lock_file.close()  # killed
    turns = other.store.read(opened.id).conversation.turns
    assert [turn.answer for turn in turns] == ["good", "half"]


def test_a_session_that_another_program_writes_in_is_left_alone(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("a", gate, answer())), make_tui()
    mine = one.manager.open_empty()
    mine.ask("q")
    seen = other.manager.get(mine.id)
    for change in (
        lambda: seen.apply_setting("temperature", "0.5"),
        lambda: seen.run_command("/clear"),
        lambda: seen.load_model("other"),
    ):
        with pytest.raises(SessionBusy):
            change()
    assert not seen.save_error
    gate.set()
    wait_for_answer(one, mine)
    other.manager.sync_store()
    assert seen.id == mine.id
    assert seen.chat.conversation == mine.chat.conversation


def test_growing_answer_is_stored_periodically(make_tui: MakeTui) -> None:
    gate = threading.Event()
    tui = make_tui(("half", gate, " whole", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait(lambda: opened.answer_stream and opened.answer_stream.num_tokens)
    tui.manager.sync_store()
    other = make_tui()
    seen = other.manager.get(opened.id)
    assert seen.record.unfinished_turn is not None
    assert seen.record.unfinished_turn.answer == "half"
    with pytest.raises(SessionBusy):
        seen.ask("me too")
    gate.set()
    wait_for_answer(tui, opened)
    assert other.manager.sync_store()
    assert seen.chat.conversation == opened.chat.conversation


def test_growing_answer_is_stored_while_an_editor_is_open(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("half", gate, " whole", answer())), make_tui()
    opened = one.manager.open_empty()
    opened.ask("q")
    wait(lambda: opened.answer_stream and opened.answer_stream.num_tokens)
    with one.manager.syncing_in_background(0.01):
        wait(
            lambda: (
                (growing := other.store.read(opened.id).unfinished_turn)
                and growing.answer == "half"
            )
        )
        gate.set()
        wait(lambda: other.store.read(opened.id).conversation.turns)
    assert opened.chat.conversation.turns[0].answer == "half whole"


def test_a_program_that_was_killed_is_noticed(make_tui: MakeTui) -> None:
    one, other = make_tui(("half", threading.Event())), make_tui()
    mine = one.manager.open_empty()
    mine.ask("q")
    wait(lambda: mine.answer_stream and mine.answer_stream.num_tokens)
    one.manager.sync_store()
    seen = other.manager.get(mine.id)
    other.manager.sync_store()
    assert [listed.is_generating for listed in other.manager.summaries] == [True]
    one.writer._lock_file.close()
    other.manager.sync_store()
    assert [listed.is_generating for listed in other.manager.summaries] == [False]
    assert [(turn.answer, turn.summary) for turn in seen.chat.conversation.turns] == [
        ("half", INTERRUPTED_SUMMARY)
    ]


def test_two_programs_in_one_session(make_tui: MakeTui) -> None:
    one, other = make_tui(), make_tui()
    mine = one.manager.open_empty()
    theirs = other.manager.get(mine.id)
    theirs.ask("theirs")
    wait_for_answer(other, theirs)
    with pytest.raises(SessionChanged):
        mine.ask("mine")
    one.manager.sync_store()
    mine.ask("mine")
    wait_for_answer(one, mine)
    other.manager.sync_store()
    assert [turn.prompt for turn in theirs.chat.conversation.turns] == ["theirs", "mine"]


def test_conflicting_changes_are_kept_as_two_sessions(make_tui: MakeTui) -> None:
    one, other = make_tui(), make_tui()
    mine = one.manager.open_empty()
    theirs = other.manager.get(mine.id)
    theirs.ask("theirs")
    wait_for_answer(other, theirs)
    mine.run_command("/set system be brief")
    assert mine.save_error == ""
    assert mine.id != theirs.id
    assert one.store.read(theirs.id).conversation == theirs.chat.conversation
    assert one.store.read(mine.id).conversation.system == "be brief"
    assert one.manager.get(mine.id) is mine
    seen = one.manager.get(theirs.id)
    assert seen is not mine
    assert seen.chat.conversation == theirs.chat.conversation
    (said,) = mine.messages
    assert "continues as 'New session (2)'" in said


def test_full_disk_is_retried_until_it_has_room(
    make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch
) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    full = DiskFull("the disk is full")

    def refuse(*_: object) -> None:
        raise full

    with monkeypatch.context() as patched:
        for name in ("begin_turn", "update", "finish_turn", "update_turn"):
            patched.setattr(SessionStore, name, refuse)
        opened.ask("q")
        turn = wait_for_answer(tui, opened)
        assert turn.answer == "re: q"
        assert opened.save_error == "the disk is full"
    tui.manager.sync_store()
    assert opened.save_error == ""
    assert tui.store.read(opened.id).conversation.turns == (turn,)


def test_a_store_that_a_newer_localgen_upgrades(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as sqlite:
            sqlite.execute("ALTER TABLE turns ADD COLUMN mood TEXT")
            sqlite.execute(f"PRAGMA user_version = {len(SESSIONS_SCHEMA) + 1}")
        await tui.ask(pilot, "two")
        assert [turn.answer for turn in turns(tui)] == ["re: one", "re: two"]
        assert "not saved: a newer localgen has upgraded" in session_status(tui.opened)[0]
        tui.app.sync_store()
        await press(tui, pilot, "ctrl+n")  # what cannot be stored is not begun
        assert "a newer localgen has upgraded" in notice_text(tui)
        assert len(turns(tui)) == 2
        with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as sqlite:
            assert sqlite.execute("SELECT prompt FROM turns").fetchall() == [("one",)]

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("name", ["update_turn", "finish_turn"])
def test_disk_that_fills_up_during_an_answer(
    make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gate = threading.Event()
    tui = make_tui(("a", gate, "b", answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")

    def refuse(*_: object) -> None:
        raise DiskFull("full")

    with monkeypatch.context() as patched:
        patched.setattr(SessionStore, name, refuse)
        tui.manager.sync_store()
        gate.set()
        turn = wait_for_answer(tui, opened)
    tui.manager.sync_store()
    assert tui.store.read(opened.id).conversation.turns == (turn,)
    assert tui.store.list_sessions()[0].is_generating is False


def test_a_store_that_is_not_kept_is_announced(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        assert "conversations are not kept" in tui.screen_text()

    play(Tui(tmp_path, notice="conversations are not kept"), scene)


def test_a_name_given_by_another_program_stays(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("a", gate, answer())), make_tui()
    mine = one.manager.open_empty()
    mine.ask("q")
    wait(lambda: mine.answer_stream and mine.answer_stream.num_tokens)
    other.manager.rename(mine.id, "theirs")
    one.manager.sync_store()
    gate.set()
    wait_for_answer(one, mine)
    assert one.store.read(mine.id).name == "theirs"
    assert mine.name == "theirs"


def test_a_draft_outlives_the_program(make_tui: MakeTui, tmp_path: Path) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    opened.unsent_prompt = "half a thought"
    tui.manager.sync_store()
    tui.store.close()
    tui.writer._lock_file.close()  # killed
    again = make_tui()
    assert again.manager.get(opened.id).unsent_prompt == "half a thought"
    tui.store = again.store  # close() of the fixture closes one of them


def test_quit_stops_and_keeps_partial_answers(make_tui: MakeTui) -> None:
    tui = make_tui(("half", threading.Event()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait(lambda: opened.answer_stream and opened.answer_stream.num_tokens)
    tui.manager.close()
    assert tui.store.read(opened.id).conversation.turns == (Turn("q", "half", True, "", "stopped"),)
    assert all(client.closed for client in tui.clients)


def test_session_record_is_a_value() -> None:
    assert replace(SessionRecord(1), name="x") == SessionRecord(1, "x")
