"""Open sessions without a screen: asking, stopping, faults, and what is kept of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_client import answer
from tui_chats import Tui

from localgen.backends.errors import (
    DiskFull,
    EngineDied,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ServerUnavailable,
)
from localgen.backends.types import SamplingParams
from localgen.chats import commands
from localgen.chats.conversation import Turn
from localgen.chats.options import ModelOptions
from localgen.chats.sessions import BROKEN_OFF, Kept, SessionBusy, SessionChanged, Sessions
from localgen.client import Text
from localgen.tui.chat.open_session import OpenSession
from localgen.tui.chat.variants import variants

Make = Callable[..., Tui]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Tui] = []

    def one(*scripts: object, **options: object) -> Tui:
        made.append(Tui(tmp_path, *scripts, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        each.close()


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def settle(tui: Tui, opened: OpenSession) -> Turn:
    """The turn of the answer that grows in a session."""
    assert opened.last is not None
    assert opened.last.ended.wait(10)
    tui.desk.settle()
    assert opened.answering is None
    return opened.session.conversation.turns[-1]


def test_an_answer_becomes_a_turn_and_is_kept(make: Make, tmp_path: Path) -> None:
    tui = make((Text("", 1, "hm"), "4", "2", answer()))
    opened = tui.desk.first()
    opened.ask("6 * 7?")
    turn = settle(tui, opened)
    assert (turn.prompt, turn.answer, turn.reasoning, turn.stopped) == ("6 * 7?", "42", "hm", False)
    assert turn.served.startswith("tiny · TTFT 56 ms")
    assert opened.name == "6 * 7?"
    other = make()
    assert other.desk.get(opened.id).session.conversation == opened.session.conversation


def test_sessions_answer_at_once(make: Make) -> None:
    gates = [threading.Event(), threading.Event()]
    tui = make(("a", gates[0], answer()), ("b", gates[1], answer()))
    first = tui.desk.first()
    first.ask("one")
    wait(lambda: first.answering and first.answering.tokens)
    second = tui.desk.first()
    assert second is not first
    second.ask("two")
    wait(lambda: second.answering and second.answering.tokens)
    assert len(tui.desk.answering) == 2
    gates[1].set()
    assert settle(tui, second).answer == "b"
    assert first.is_answering
    gates[0].set()
    assert settle(tui, first).answer == "a"


def test_stopping_keeps_what_there_is_and_the_session_goes_on(make: Make) -> None:
    tui = make(("half", threading.Event()))
    opened = tui.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    with pytest.raises(InvalidRequest, match=r"Ctrl\+C stops it"):
        opened.ask("another")
    assert opened.stop()
    turn = settle(tui, opened)
    assert turn == Turn("q", "half", True, "", "stopped")
    assert not opened.stop()
    opened.ask("next")
    assert settle(tui, opened).answer == "re: next"


def test_a_server_that_goes_away_leaves_the_half(make: Make) -> None:
    tui = make(("ha", "lf", ServerUnavailable("the server went away")), ("whole", answer()))
    opened = tui.desk.first()
    opened.ask("q")
    turn = settle(tui, opened)
    assert turn == Turn("q", "half", True, "", "broken off: the server went away")
    opened.ask_again()
    assert settle(tui, opened).answer == "whole"
    assert len(opened.session.conversation.turns) == 1


@pytest.mark.parametrize("gone", [ServerUnavailable("left"), EngineDied("died")])
def test_what_had_left_is_started_again(make: Make, gone: Exception) -> None:
    tui = make((gone,), ("whole", answer()))
    opened = tui.desk.first()
    opened.ask("q")
    assert settle(tui, opened).answer == "whole"


def test_what_fails_again_is_told(make: Make) -> None:
    tui = make((ServerUnavailable("left"),), (ServerUnavailable("left again"),))
    opened = tui.desk.first()
    opened.ask("q")
    turn = settle(tui, opened)
    assert turn.is_unanswered
    assert turn.served == "broken off: left again"
    opened.ask("next")
    settle(tui, opened)
    # a prompt that was never answered is not sent again
    assert [m.content for m in tui.clients[0].record.asked[-1].messages] == ["next"]


def test_a_model_that_does_not_load(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tui = make()
    opened = tui.desk.first()

    def fail(*_: object, **__: object) -> None:
        raise LoadFailed("x.gguf is no model")

    monkeypatch.setattr(opened.session.client, "load", fail)
    opened.ask("q")
    assert settle(tui, opened).served == "broken off: x.gguf is no model"


def test_a_defect_is_a_sentence(make: Make) -> None:
    tui = make((ZeroDivisionError("oh"),))
    opened = tui.desk.first()
    opened.ask("q")
    assert "a defect of localgen (ZeroDivisionError: oh)" in settle(tui, opened).served


def test_asking_again_in_vain_keeps_the_answer_there_was(make: Make) -> None:
    gone = ServerUnavailable("gone")
    tui = make(("good", answer()), (gone,), (gone,))
    opened = tui.desk.first()
    opened.ask("q")
    before = settle(tui, opened)
    opened.ask_again()
    assert settle(tui, opened) == before
    assert tui.store.read(opened.id).conversation.turns == (before,)
    assert opened.last is not None
    assert opened.last.error == "gone"


def test_asking_again_needs_a_question(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="nothing has been asked"):
        make().desk.first().ask_again()


def test_what_grows_is_written_as_it_grows(make: Make) -> None:
    gate = threading.Event()
    tui = make(("half", gate, " whole", answer()))
    opened = tui.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    tui.desk.keep()
    other = make()
    seen = other.desk.get(opened.id)
    assert seen.kept.growing is not None
    assert seen.kept.growing.answer == "half"
    with pytest.raises(SessionBusy):
        seen.ask("me too")
    gate.set()
    settle(tui, opened)
    assert other.desk.keep()
    assert seen.session.conversation == opened.session.conversation


def test_a_program_that_was_killed_is_noticed(make: Make) -> None:
    one, other = make(("half", threading.Event())), make()
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


def test_two_programs_in_one_session(make: Make) -> None:
    one, other = make(), make()
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


def test_what_two_programs_change_at_once_is_kept_twice(make: Make) -> None:
    one, other = make(), make()
    mine = one.desk.first()
    theirs = other.desk.get(mine.id)
    theirs.ask("theirs")
    settle(other, theirs)
    mine.obey("/set system be brief", lambda _: None)
    assert mine.unkept == ""
    assert mine.id != theirs.id
    assert one.store.read(theirs.id).conversation == theirs.session.conversation
    assert one.store.read(mine.id).conversation.system == "be brief"


def test_a_full_disk_stops_nothing_and_is_made_up_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tui = make()
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
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    gate = threading.Event()
    tui = make(("a", gate, "b", answer()))
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


def test_a_draft_outlives_the_program(make: Make, tmp_path: Path) -> None:
    tui = make()
    opened = tui.desk.first()
    opened.draft = "half a thought"
    tui.desk.keep()
    tui.store.close()
    tui.writer._lock.close()  # killed
    again = make()
    assert again.desk.get(opened.id).draft == "half a thought"
    tui.store = again.store  # close() of the fixture closes one of them


def test_fork_goes_on_alone(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    opened.ask("q")
    settle(tui, opened)
    fork = tui.desk.fork(opened)
    assert fork.name == "q (2)"
    assert tui.desk.fork(opened).name == "q (3)"
    assert fork.session.conversation == opened.session.conversation
    fork.ask("more")
    settle(tui, fork)
    assert len(opened.session.conversation.turns) == 1


def test_delete_and_restore(make: Make) -> None:
    gate = threading.Event()
    tui = make((gate, answer()))
    opened = tui.desk.first()
    opened.ask("q")
    with pytest.raises(InvalidRequest, match="stop it first"):
        tui.desk.delete(opened.id)
    gate.set()
    settle(tui, opened)
    tui.desk.delete(opened.id)
    assert tui.desk.listed == []
    assert opened.id not in tui.desk.open
    tui.desk.restore(opened.id)
    assert tui.desk.get(opened.id).session.conversation.turns[0].prompt == "q"


def test_an_empty_session_is_used_again(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    assert tui.desk.first() is opened
    opened.ask("q")
    settle(tui, opened)
    assert tui.desk.first() is not opened


def test_settings_of_a_session_come_back_with_it(make: Make) -> None:
    tui = make(options=ModelOptions(params=SamplingParams(top_k=7), system="be brief"))
    opened = tui.desk.first()
    opened.set_params(SamplingParams(temperature=0.0, stop=("\n",)))
    opened.set_ctx(512)
    again = make(options=ModelOptions(verbose=True)).desk.get(opened.id)
    assert again.session.options == ModelOptions(
        params=SamplingParams(temperature=0.0, stop=("\n",)),
        ctx=512,
        system="be brief",
        verbose=True,
    )
    assert again.session.conversation.system == "be brief"


def test_a_model_of_its_own(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    opened.use_model("other", lambda _: None)
    with pytest.raises(ModelNotFound):
        opened.use_model("nonsense", lambda _: None)
    assert opened.session.name == "other"
    assert make().desk.get(opened.id).session.asked == "other"


def test_commands_change_what_is_kept(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    for prompt in "ab":
        opened.ask(prompt)
        settle(tui, opened)
    assert opened.obey("/undo", lambda _: None) == commands.Say("1 turn left")
    assert [t.prompt for t in tui.store.read(opened.id).conversation.turns] == ["a"]
    with pytest.raises(InvalidRequest):
        opened.obey("/undo 5", lambda _: None)
    # commands that ask about the model load it
    fresh = tui.desk.first()
    said = fresh.obey("/show info", lambda _: None)
    assert isinstance(said, commands.Say)
    assert "llama 6M F16" in said.text


def test_search_finds_names_prompts_and_answers(make: Make) -> None:
    tui = make(("Ein Öl und *Salz*", answer()), ("nothing", answer()))
    one = tui.desk.first()
    one.ask("Was ist ÖLIG?")
    settle(tui, one)
    two = tui.desk.first()
    two.ask("x")
    settle(tui, two)
    tui.desk.rename(two.id, "über Öl")
    found = tui.desk.search("öl")
    assert {(hit.session, hit.place) for hit in found} == {
        (one.id, None), (two.id, None), (one.id, 0)
    }  # fmt: skip
    assert [hit.excerpt for hit in tui.desk.search("salz")] == ["Ein Öl und *Salz*"]
    assert tui.desk.search("  ") == []
    assert tui.desk.search("absent") == []


def test_renaming(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    tui.desk.rename(opened.id, " a\n\x1b[31mname ")
    assert opened.name == "a ␛[31mname"
    with pytest.raises(InvalidRequest):
        tui.desk.rename(opened.id, " \n")


def test_comparing_makes_sessions_that_go_on(make: Make) -> None:
    tui = make()
    opened = tui.desk.first()
    opened.ask("q")
    settle(tui, opened)
    compared = variants("tiny\n\nother temperature=0 top-k=1", opened.session.options.params)
    made = tui.desk.compare(opened, compared)
    assert [each.session.asked for each in made] == [None, "other"]
    assert made[1].session.options.params == SamplingParams(temperature=0.0, top_k=1)
    assert [each.name for each in made] == ["q · tiny", "q · other temperature=0 top-k=1"]
    for each in made:
        each.ask("both")
    for each in made:
        assert settle(tui, each).answer == "re: both"
        assert len(each.session.conversation.turns) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tiny", "2 to 8 lines"),
        ("tiny\n" * 9, "2 to 8 lines"),
        ("tiny\ntiny temperature", "line 2: temperature: give NAME=VALUE"),
        ("tiny temp=x\ntiny", "line 1: temperature 'x': give a number"),
        ("tiny\ntiny 'x", "line 2: close the quote"),
        ("tiny\ntiny nonsense=1", "line 2: no parameter"),
    ],
)
def test_what_cannot_be_compared(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        variants(text, SamplingParams())


def test_leaving_stops_and_keeps(make: Make) -> None:
    tui = make(("half", threading.Event()))
    opened = tui.desk.first()
    opened.ask("q")
    wait(lambda: opened.answering and opened.answering.tokens)
    tui.desk.close()
    assert tui.store.read(opened.id).conversation.turns == (Turn("q", "half", True, "", "stopped"),)
    assert all(client.closed for client in tui.clients)


def test_a_growing_answer_is_read_in_pieces(make: Make) -> None:
    gate = threading.Event()
    tui = make(("a", Text("b", 2, "t"), gate, "c", answer()))
    opened = tui.desk.first()
    opened.ask("q")
    answering = opened.answering
    assert answering is not None
    from localgen.tui.chat.answering import Position

    wait(lambda: answering.tokens == 2)
    thought, text, place = answering.since(Position())
    assert (thought, text) == ("t", "ab")
    assert answering.line() == "TTFT 0 ms · 2 tokens · context ~2/2,048"
    gate.set()
    assert answering.ended.wait(10)
    assert answering.since(place)[:2] == ("", "c")
    assert answering.speed() == "TTFT 56 ms · 41.2 tok/s"


def test_kept_is_a_value() -> None:
    assert replace(Kept(1), name="x") == Kept(1, "x")
