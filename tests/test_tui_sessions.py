"""Open sessions without a screen: forks, settings, names, searches, comparisons."""

from __future__ import annotations

import threading

import pytest
from scripted_client import answer
from tui_chats import MakeTui, wait_for_answer

from localgen.backends.errors import (
    InvalidRequest,
    ModelNotFound,
)
from localgen.backends.sampling_params import SamplingParams
from localgen.chat import commands
from localgen.chat.parameters import ModelOptions
from localgen.tui.chat.active_session import CTX_SETTING
from localgen.tui.chat.compare import parse_variants


def test_model_change_resets_the_context(make_tui: MakeTui) -> None:
    opened = make_tui().manager.open_empty()
    opened.load_model("other")
    opened.apply_setting(CTX_SETTING, "512")
    opened.load_model("tiny")
    assert opened.chat.options.ctx is None


def test_fork_is_independent(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait_for_answer(tui, opened)
    fork = tui.manager.fork(opened)
    assert fork.name == "q (2)"
    assert tui.manager.fork(opened).name == "q (3)"
    assert fork.chat.conversation == opened.chat.conversation
    fork.ask("more")
    wait_for_answer(tui, fork)
    assert len(opened.chat.conversation.turns) == 1


def test_deleted_session_can_be_restored(make_tui: MakeTui) -> None:
    gate = threading.Event()
    tui = make_tui((gate, answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    with pytest.raises(InvalidRequest, match="stop it first"):
        tui.manager.delete(opened.id)
    gate.set()
    wait_for_answer(tui, opened)
    tui.manager.delete(opened.id)
    assert tui.manager.summaries == []
    assert opened.id not in tui.manager.active_by_id
    tui.manager.restore(opened.id)
    assert tui.manager.get(opened.id).chat.conversation.turns[0].prompt == "q"


def test_an_empty_session_is_used_again(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    assert tui.manager.open_empty() is opened
    opened.ask("q")
    wait_for_answer(tui, opened)
    assert tui.manager.open_empty() is not opened


def test_settings_of_a_session_come_back_with_it(make_tui: MakeTui) -> None:
    tui = make_tui(options=ModelOptions(params=SamplingParams(top_k=7), system="be brief"))
    opened = tui.manager.open_empty()
    opened.apply_setting("temperature", "0")
    opened.apply_setting("top_k", "")
    opened.apply_setting("stop", r"\n")
    opened.apply_setting(CTX_SETTING, "512")
    again = make_tui(options=ModelOptions(verbose=True)).manager.get(opened.id)
    assert again.chat.options == ModelOptions(
        params=SamplingParams(temperature=0.0, stop=("\n",)),
        ctx=512,
        system="be brief",
        verbose=True,
    )
    assert again.chat.conversation.system == "be brief"


def test_session_keeps_its_own_model(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    opened.load_model("other")
    with pytest.raises(ModelNotFound):
        opened.load_model("nonsense")
    assert opened.chat.name == "other"
    assert make_tui().manager.get(opened.id).chat.requested_model == "other"


def test_a_session_keeps_the_model_that_was_the_default(
    make_tui: MakeTui, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "tiny")
    tui = make_tui(("a", answer()))
    opened = tui.manager.open_empty()
    assert tui.store.read(opened.id).model is None
    opened.ask("q")
    wait_for_answer(tui, opened)
    monkeypatch.setenv("LOCALGEN_MODEL", "other")
    assert tui.store.read(opened.id).model == "tiny"
    assert make_tui().manager.get(opened.id).chat.requested_name == "tiny"


def test_commands_change_what_is_kept(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    for prompt in "ab":
        opened.ask(prompt)
        wait_for_answer(tui, opened)
    assert opened.run_command("/undo") == commands.CommandOutput("1 turn left")
    assert [t.prompt for t in tui.store.read(opened.id).conversation.turns] == ["a"]
    with pytest.raises(InvalidRequest):
        opened.run_command("/undo 5")
    # commands that ask about the model load it
    fresh = tui.manager.open_empty()
    said = fresh.run_command("/show info")
    assert isinstance(said, commands.CommandOutput)
    assert "llama 6M F16" in said.text


def test_search_finds_names_prompts_and_answers(make_tui: MakeTui) -> None:
    tui = make_tui(("Ein Öl und *Salz*", answer()), ("nothing", answer()))
    one = tui.manager.open_empty()
    one.ask("Was ist ÖLIG?")
    wait_for_answer(tui, one)
    two = tui.manager.open_empty()
    two.ask("x")
    wait_for_answer(tui, two)
    tui.manager.rename(two.id, "über Öl")
    found = tui.manager.search("öl")
    assert {(hit.session_id, hit.turn_index) for hit in found} == {
        (one.id, None), (two.id, None), (one.id, 0)
    }  # fmt: skip
    assert [hit.excerpt for hit in tui.manager.search("salz")] == ["Ein Öl und *Salz*"]
    assert tui.manager.search("  ") == []
    assert tui.manager.search("absent") == []


def test_rename_cleans_the_name(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    tui.manager.rename(opened.id, " a\n\x1b[31mname ")
    assert opened.name == r"a \x1b[31mname"
    with pytest.raises(InvalidRequest):
        tui.manager.rename(opened.id, " \n")


def test_compared_answers_become_sessions(make_tui: MakeTui) -> None:
    tui = make_tui()
    opened = tui.manager.open_empty()
    opened.ask("q")
    wait_for_answer(tui, opened)
    compared = parse_variants("tiny\n\nother temperature=0 top-k=1", opened.chat.options.params)
    made = tui.manager.compare(opened, compared)
    assert [each.chat.requested_model for each in made] == ["tiny", "other"]
    assert made[1].chat.options.params == SamplingParams(temperature=0.0, top_k=1)
    assert [each.name for each in made] == ["q · tiny", "q · other temperature=0 top-k=1"]
    for each in made:
        each.ask("both")
    for each in made:
        assert wait_for_answer(tui, each).answer == "re: both"
        assert len(each.chat.conversation.turns) == 2


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
def test_invalid_comparisons_are_rejected(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        parse_variants(text, SamplingParams())
