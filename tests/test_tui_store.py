"""What is kept of sessions: by programs that are killed, by several at once, on a full disk."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_client import answer
from tui_chats import MakeTui, settle, wait

from localgen.backends.errors import DiskFull
from localgen.chat.conversation import Turn
from localgen.chat.session_store import BROKEN_OFF, Kept, SessionBusy, SessionChanged, Sessions


def test_an_answer_outlives_a_program_that_is_killed_while_it_asks_again(make_tui: MakeTui) -> None:
    tui, other = make_tui(("good", answer()), ("half", threading.Event())), make_tui()
    opened = tui.desk.first()
    opened.ask("q")
    settle(tui, opened)
    opened.ask_again()
    wait(lambda: opened.answering and opened.answering.tokens)
    tui.desk.keep()
    tui.writer._lock.close()  # killed
    turns = other.store.read(opened.id).conversation.turns
    assert [turn.answer for turn in turns] == ["good", "half"]


def test_a_session_that_another_program_writes_in_is_left_alone(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("a", gate, answer())), make_tui()
    mine = one.desk.first()
    mine.ask("q")
    seen = other.desk.get(mine.id)
    for change in (
        lambda: seen.set("temperature", "0.5"),
        lambda: seen.obey("/clear"),
        lambda: seen.use_model("other", lambda _: None),
    ):
        with pytest.raises(SessionBusy):
            change()
    assert not seen.unkept
    gate.set()
    settle(one, mine)
    other.desk.keep()
    assert seen.id == mine.id
    assert seen.session.conversation == mine.session.conversation


def test_what_grows_is_written_as_it_grows(make_tui: MakeTui) -> None:
    gate = threading.Event()
    tui = make_tui(("half", gate, " whole", answer()))
    opened = tui.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    tui.desk.keep()
    other = make_tui()
    seen = other.desk.get(opened.id)
    assert seen.kept.growing is not None
    assert seen.kept.growing.answer == "half"
    with pytest.raises(SessionBusy):
        seen.ask("me too")
    gate.set()
    settle(tui, opened)
    assert other.desk.keep()
    assert seen.session.conversation == opened.session.conversation


def test_what_grows_is_written_while_the_program_waits_for_an_editor(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("half", gate, " whole", answer())), make_tui()
    opened = one.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    with one.desk.keeping(0.01):
        wait(lambda: (growing := other.store.read(opened.id).growing) and growing.answer == "half")
        gate.set()
        wait(lambda: other.store.read(opened.id).conversation.turns)
    assert opened.session.conversation.turns[0].answer == "half whole"


def test_a_program_that_was_killed_is_noticed(make_tui: MakeTui) -> None:
    one, other = make_tui(("half", threading.Event())), make_tui()
    mine = one.desk.first()
    mine.ask("q")
    wait(lambda: mine.answering and mine.answering.tokens)
    one.desk.keep()
    seen = other.desk.get(mine.id)
    other.desk.keep()
    assert [listed.is_growing for listed in other.desk.listed] == [True]
    one.writer._lock.close()
    other.desk.keep()
    assert [listed.is_growing for listed in other.desk.listed] == [False]
    assert [(turn.answer, turn.served) for turn in seen.session.conversation.turns] == [
        ("half", BROKEN_OFF)
    ]


def test_two_programs_in_one_session(make_tui: MakeTui) -> None:
    one, other = make_tui(), make_tui()
    mine = one.desk.first()
    theirs = other.desk.get(mine.id)
    theirs.ask("theirs")
    settle(other, theirs)
    with pytest.raises(SessionChanged):
        mine.ask("mine")
    one.desk.keep()
    mine.ask("mine")
    settle(one, mine)
    other.desk.keep()
    assert [turn.prompt for turn in theirs.session.conversation.turns] == ["theirs", "mine"]


def test_what_two_programs_change_at_once_is_kept_twice(make_tui: MakeTui) -> None:
    one, other = make_tui(), make_tui()
    mine = one.desk.first()
    theirs = other.desk.get(mine.id)
    theirs.ask("theirs")
    settle(other, theirs)
    mine.obey("/set system be brief")
    assert mine.unkept == ""
    assert mine.id != theirs.id
    assert one.store.read(theirs.id).conversation == theirs.session.conversation
    assert one.store.read(mine.id).conversation.system == "be brief"
    assert one.desk.get(mine.id) is mine
    seen = one.desk.get(theirs.id)
    assert seen is not mine
    assert seen.session.conversation == theirs.session.conversation
    (said,) = mine.said
    assert "goes on as New session (2)" in said


def test_a_full_disk_stops_nothing_and_is_made_up_for(
    make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch
) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    full = DiskFull("the disk is full")

    def refuse(*_: object) -> None:
        raise full

    with monkeypatch.context() as patched:
        for name in ("begin", "change", "end", "grow"):
            patched.setattr(Sessions, name, refuse)
        opened.ask("q")
        turn = settle(tui, opened)
        assert turn.answer == "re: q"
        assert opened.unkept == "the disk is full"
    tui.desk.keep()
    assert opened.unkept == ""
    assert tui.store.read(opened.id).conversation.turns == (turn,)


@pytest.mark.parametrize("name", ["grow", "end"])
def test_a_disk_that_fills_up_in_mid_answer(
    make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gate = threading.Event()
    tui = make_tui(("a", gate, "b", answer()))
    opened = tui.desk.first()
    opened.ask("q")

    def refuse(*_: object) -> None:
        raise DiskFull("full")

    with monkeypatch.context() as patched:
        patched.setattr(Sessions, name, refuse)
        tui.desk.keep()
        gate.set()
        turn = settle(tui, opened)
    tui.desk.keep()
    assert tui.store.read(opened.id).conversation.turns == (turn,)
    assert tui.store.all()[0].is_growing is False


def test_a_name_given_by_another_program_stays(make_tui: MakeTui) -> None:
    gate = threading.Event()
    one, other = make_tui(("a", gate, answer())), make_tui()
    mine = one.desk.first()
    mine.ask("q")
    wait(lambda: mine.answering and mine.answering.tokens)
    other.desk.rename(mine.id, "theirs")
    one.desk.keep()
    gate.set()
    settle(one, mine)
    assert one.store.read(mine.id).name == "theirs"
    assert mine.name == "theirs"


def test_a_draft_outlives_the_program(make_tui: MakeTui, tmp_path: Path) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    opened.draft = "half a thought"
    tui.desk.keep()
    tui.store.close()
    tui.writer._lock.close()  # killed
    again = make_tui()
    assert again.desk.get(opened.id).draft == "half a thought"
    tui.store = again.store  # close() of the fixture closes one of them


def test_leaving_stops_and_keeps(make_tui: MakeTui) -> None:
    tui = make_tui(("half", threading.Event()))
    opened = tui.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    tui.desk.close()
    assert tui.store.read(opened.id).conversation.turns == (Turn("q", "half", True, "", "stopped"),)
    assert all(client.closed for client in tui.clients)


def test_kept_is_a_value() -> None:
    assert replace(Kept(1), name="x") == Kept(1, "x")
