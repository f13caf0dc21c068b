"""Open sessions without a screen: forks, settings, names, searches, comparisons."""

from __future__ import annotations

import threading

import pytest
from scripted_client import answer
from tui_chats import MakeTui, settle

from localgen.backends.errors import (
    InvalidRequest,
    ModelNotFound,
)
from localgen.backends.types import SamplingParams
from localgen.chat import commands
from localgen.chat.parameters import ModelOptions
from localgen.tui.chat.active_session import CTX
from localgen.tui.chat.compare import variants


def test_another_model_has_no_use_for_the_context_of_the_last(make_tui: MakeTui) -> None:
    opened = make_tui().desk.first()
    opened.use_model("other", lambda _: None)
    opened.set(CTX, "512")
    opened.use_model("tiny", lambda _: None)
    assert opened.session.options.ctx is None


def test_fork_goes_on_alone(make_tui: MakeTui) -> None:
    tui = make_tui()
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


def test_delete_and_restore(make_tui: MakeTui) -> None:
    gate = threading.Event()
    tui = make_tui((gate, answer()))
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


def test_an_empty_session_is_used_again(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    assert tui.desk.first() is opened
    opened.ask("q")
    settle(tui, opened)
    assert tui.desk.first() is not opened


def test_settings_of_a_session_come_back_with_it(make_tui: MakeTui) -> None:
    tui = make_tui(options=ModelOptions(params=SamplingParams(top_k=7), system="be brief"))
    opened = tui.desk.first()
    opened.set("temperature", "0")
    opened.set("top_k", "")
    opened.set("stop", r"\n")
    opened.set(CTX, "512")
    again = make_tui(options=ModelOptions(verbose=True)).desk.get(opened.id)
    assert again.session.options == ModelOptions(
        params=SamplingParams(temperature=0.0, stop=("\n",)),
        ctx=512,
        system="be brief",
        verbose=True,
    )
    assert again.session.conversation.system == "be brief"


def test_a_model_of_its_own(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    opened.use_model("other", lambda _: None)
    with pytest.raises(ModelNotFound):
        opened.use_model("nonsense", lambda _: None)
    assert opened.session.name == "other"
    assert make_tui().desk.get(opened.id).session.asked == "other"


def test_commands_change_what_is_kept(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    for prompt in "ab":
        opened.ask(prompt)
        settle(tui, opened)
    assert opened.obey("/undo") == commands.Say("1 turn left")
    assert [t.prompt for t in tui.store.read(opened.id).conversation.turns] == ["a"]
    with pytest.raises(InvalidRequest):
        opened.obey("/undo 5")
    # commands that ask about the model load it
    fresh = tui.desk.first()
    said = fresh.obey("/show info")
    assert isinstance(said, commands.Say)
    assert "llama 6M F16" in said.text


def test_search_finds_names_prompts_and_answers(make_tui: MakeTui) -> None:
    tui = make_tui(("Ein Öl und *Salz*", answer()), ("nothing", answer()))
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


def test_renaming(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.desk.first()
    tui.desk.rename(opened.id, " a\n\x1b[31mname ")
    assert opened.name == "a ␛[31mname"
    with pytest.raises(InvalidRequest):
        tui.desk.rename(opened.id, " \n")


def test_comparing_makes_sessions_that_go_on(make_tui: MakeTui) -> None:
    tui = make_tui()
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
