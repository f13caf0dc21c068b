"""Each key of the tui, pressed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from scripted_client import answer
from textual.events import Paste
from textual.pilot import Pilot
from textual.widgets import Collapsible, Input, OptionList, Static, TextArea
from tui_chats import Tui

from localgen.backends.errors import ServerUnavailable
from localgen.backends.types import SamplingParams
from localgen.chats.conversation import Turn
from localgen.client import Text, pulling
from localgen.client.pulling import Offer
from localgen.tui.chat.ask_text import AskText
from localgen.tui.chat.compare import Column, CompareScreen, CompareSetup
from localgen.tui.chat.models import ModelPicker
from localgen.tui.chat.prompt import FOLDED_CHARS, Suggestions
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.transcript import Transcript
from localgen.tui.chat.turn_view import TurnView
from localgen.tui.confirm import Confirm
from localgen.tui.gauges.panel import Gauges
from localgen.tui.shell import KeyHelp, TooSmall

Play = Callable[[Tui, Pilot[None]], Awaitable[None]]


def play(tui: Tui, scene: Play, size: tuple[int, int] = (120, 40)) -> None:
    async def run() -> None:
        try:
            async with tui.running(size) as pilot:
                await scene(tui, pilot)
        finally:
            tui.close()

    asyncio.run(run())


def told(tui: Tui) -> str:
    return str(tui.main.query_one("#told", Static).content)


def turns(tui: Tui) -> list[Turn]:
    return list(tui.opened.session.conversation.turns)


async def press(tui: Tui, pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await tui.settled(pilot)


def test_enter_sends_and_the_answer_stands_there(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"hi there")
        await press(tui, pilot, "enter")
        assert tui.asked == ["hi there"]
        assert tui.prompt.text == ""
        (view,) = tui.main.query(TurnView)
        assert view.turn.answer == "re: hi there"
        assert "re: hi there" in tui.screen_text()
        assert "TTFT 56 ms" in tui.screen_text()

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
        tui.prompt.put("/set parameter temp")
        await pilot.press("tab")
        assert tui.prompt.text == "/set parameter temperature "
        tui.prompt.put("no command /x")
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
        assert tui.opened.draft == f"see {text}!"
        await press(tui, pilot, "enter")
        assert tui.asked == [f"see {text}!"]
        assert "characters more" in tui.screen_text()
        await pilot.press("up")
        assert len(tui.prompt.text) < FOLDED_CHARS
        assert tui.prompt.whole == f"see {text}!"

    play(Tui(tmp_path, ("ok", answer())), scene)


def test_a_small_paste_stands_as_it_is(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.prompt.post_message(Paste("a\r\nb"))
        await pilot.pause()
        assert tui.prompt.text == "a\nb"

    play(Tui(tmp_path), scene)


def test_ctrl_c_stops_then_leaves(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answering and tui.opened.answering.tokens)
        await press(tui, pilot, "ctrl+c")
        assert turns(tui) == [Turn("q", "half", True, "", "stopped")]
        assert "stopped" in tui.screen_text()
        await pilot.press("ctrl+c")
        assert "Ctrl+Q leaves" in told(tui)
        assert tui.app.is_running
        await pilot.press("ctrl+c")
        await tui.until(lambda: not tui.app.is_running)

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_ctrl_c_copies_what_is_selected(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"copy", "shift+home", "ctrl+c")
        assert tui.app.clipboard == "copy"
        assert "Ctrl+Q" not in told(tui)

    play(Tui(tmp_path), scene)


def test_ctrl_q_asks_only_while_answers_are_written(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answering and tui.opened.answering.tokens)
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, Confirm))
        assert "1 answer is still being written" in tui.screen_text()
        await pilot.press("n")
        await pilot.pause()
        assert tui.opened.is_answering
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, Confirm))
        await pilot.press("y")
        await tui.until(lambda: not tui.app.is_running)
        assert tui.store.read(tui.opened.id).conversation.turns[0].answer == "half"

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_ctrl_r_asks_again(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert "Ctrl+R asks again" in tui.screen_text()
        assert "broken off: the server went away" in tui.screen_text()
        await press(tui, pilot, "ctrl+r")
        assert [turn.answer for turn in turns(tui)] == ["whole"]
        assert "half" not in tui.screen_text()

    gone = ServerUnavailable("the server went away")
    play(Tui(tmp_path, ("half", gone), ("whole", answer())), scene)


def test_sessions_by_keys(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        first = tui.opened.id
        await pilot.press(*"draft of one")
        await press(tui, pilot, "ctrl+n")
        assert tui.opened.id != first
        assert tui.prompt.text == ""
        await tui.ask(pilot, "two")
        await press(tui, pilot, "ctrl+down")
        assert tui.opened.id == first
        assert tui.prompt.text == "draft of one"
        await press(tui, pilot, "ctrl+up")
        assert tui.opened.id != first
        await press(tui, pilot, "f4")
        assert tui.opened.name == "two (2)"
        assert [turn.prompt for turn in turns(tui)] == ["two"]
        await press(tui, pilot, "f3")
        assert isinstance(tui.app.screen, AskText)
        tui.app.screen.query_one(Input).value = "[red]forked[/]"
        await press(tui, pilot, "enter")
        await tui.until(lambda: "[red]forked[/]" in tui.screen_text())

    play(Tui(tmp_path), scene)


def test_delete_asks_and_f9_brings_back(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        session = tui.opened.id
        await press(tui, pilot, "f8")
        await press(tui, pilot, "escape")
        assert tui.opened.id == session
        await press(tui, pilot, "f8")
        await press(tui, pilot, "y")
        await tui.until(lambda: tui.main.opened and tui.opened.id != session)
        assert session not in [listed.id for listed in tui.desk.listed]
        await press(tui, pilot, "f9")
        assert tui.opened.id == session
        assert turns(tui)[0].prompt == "one"

    play(Tui(tmp_path), scene)


def test_the_list_has_keys_of_its_own(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        first = tui.opened.id
        await press(tui, pilot, "ctrl+n")
        await tui.ask(pilot, "two")
        await press(tui, pilot, "ctrl+l")
        assert isinstance(tui.app.focused, SessionList)
        await press(tui, pilot, "down", "enter")
        assert tui.opened.id == first
        await press(tui, pilot, "ctrl+l", "r")
        assert isinstance(tui.app.screen, AskText)
        await press(tui, pilot, "escape")
        await press(tui, pilot, "d")
        assert isinstance(tui.app.screen, Confirm)
        await press(tui, pilot, "n")
        await press(tui, pilot, "f")
        assert tui.opened.name == "one (2)"
        tui.main.query_one(SessionList).focus()
        await press(tui, pilot, "escape")
        assert tui.prompt.has_focus

    play(Tui(tmp_path), scene)


def test_search_goes_to_the_turn(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for number in range(3):
            await tui.ask(pilot, f"needle {number}")
        wanted = tui.opened.id
        await press(tui, pilot, "ctrl+n")
        await press(tui, pilot, "ctrl+f")
        screen = tui.app.screen
        assert isinstance(screen, SearchScreen)
        await pilot.press(*"NEEDLE 1")
        await tui.until(lambda: len(screen._hits) == 2)  # the prompt's turn holds the answer too
        await pilot.press("down", "up", "enter")
        await tui.until(lambda: tui.opened.id == wanted)
        await press(tui, pilot, "ctrl+f", "escape")
        assert tui.main.is_current

    tui = Tui(tmp_path, *[(f"answer {n}", answer()) for n in range(2)])
    tui.scripts[1] = ("and needle 1 too", answer())
    tui.scripts.insert(1, ("x", answer()))
    play(tui, scene)


def test_settings_by_keys(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        panel = tui.main.query_one(SettingsPanel)
        assert panel.display
        await pilot.press(*"0.5", "enter")
        await tui.settled(pilot)
        assert tui.opened.session.options.params == SamplingParams(temperature=0.5)
        await pilot.press("down", *"many", "enter")
        await tui.settled(pilot)
        fault = panel.query_one("#fault", Static)
        assert "top_k 'many': give a whole number" in str(fault.content)
        await pilot.press("ctrl+u", *"3", "up")
        await tui.settled(pilot)
        assert tui.opened.session.options.params.top_k == 3
        assert str(fault.content) == ""
        panel.query_one("#system", TextArea).focus()
        await pilot.press(*"be brief", "tab")
        await tui.settled(pilot)
        assert tui.opened.session.conversation.system == "be brief"
        panel.query_one("#set-ctx Input").focus()
        await pilot.press(*"12x", "escape")
        await tui.settled(pilot)
        assert not panel.display
        assert tui.prompt.has_focus
        assert tui.store.read(tui.opened.id).params.top_k == 3

    play(Tui(tmp_path), scene)


def test_folding_by_keys(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        gauges, sessions = tui.main.query_one(Gauges), tui.main.query_one(SessionList)
        assert gauges.display
        assert sessions.display
        await press(tui, pilot, "f6", "f7")
        assert not gauges.display
        assert not sessions.display
        await press(tui, pilot, "f6", "f7")
        assert gauges.display
        assert sessions.display

    play(Tui(tmp_path), scene)


def test_thoughts_by_key(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        thinking = tui.main.query_one(Collapsible)
        assert thinking.collapsed
        assert "thought, 2 words" in tui.screen_text()
        assert "deep thought" not in tui.screen_text()
        await press(tui, pilot, "f5")
        assert "deep thought" in tui.screen_text()
        await press(tui, pilot, "f5")
        assert thinking.collapsed

    play(Tui(tmp_path, (Text("", 1, "deep "), Text("", 2, "thought"), "a", answer())), scene)


def test_scrolling_by_keys(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for number in range(15):
            await tui.ask(pilot, f"prompt {number}\n\n\n\n\nend")
        transcript = tui.main.query_one(Transcript)
        end = transcript.scroll_y
        await press(tui, pilot, "pageup")
        assert transcript.scroll_y < end
        await press(tui, pilot, "pagedown", "pagedown")
        await press(tui, pilot, "ctrl+n")
        await press(tui, pilot, "ctrl+down")
        assert len(tui.main.query(TurnView)) == 12
        assert "3 earlier turns" in str(transcript.query(".note").first(Static).content)
        await press(tui, pilot, "ctrl+home")
        assert len(tui.main.query(TurnView)) == 15
        assert transcript.scroll_y == 0
        await press(tui, pilot, "ctrl+end")
        assert transcript.scroll_y > 0

    play(Tui(tmp_path), scene)


def test_choosing_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "offers", lambda: [Offer("big", "Big 70B", 40_000_000_000)])

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        screen = tui.app.screen
        assert isinstance(screen, ModelPicker)
        await tui.until(lambda: screen.query_one(OptionList).option_count == 3)
        assert "to be fetched" in tui.screen_text()
        await pilot.press(*"oth", "enter")
        await tui.until(lambda: tui.main.is_current)
        assert tui.opened.session.asked == "other"
        await tui.ask(pilot, "q")
        assert tui.clients[0].record.asked[-1].model == "other"
        await tui.ask(pilot, "/model nonsense")
        await tui.until(lambda: "no model 'nonsense' here" in tui.screen_text())
        await press(tui, pilot, "escape")
        assert tui.main.is_current
        assert tui.opened.session.asked == "other"

    play(Tui(tmp_path), scene)


def test_fetching_a_model_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    pulled: list[str] = []

    def pull(name: str, on_bytes: Callable[[int, int], None]) -> str:
        pulled.append(name)
        on_bytes(1_000_000_000, 4_000_000_000)
        while not gate.wait(0.01):
            on_bytes(1_000_000_000, 4_000_000_000)
        on_bytes(4_000_000_000, 4_000_000_000)
        return name

    monkeypatch.setattr(pulling, "offers", lambda: [Offer("third", "Third", 4_000_000_000)])
    monkeypatch.setattr(pulling, "can_pull", lambda name: name == "third")
    monkeypatch.setattr(pulling, "pull", pull)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for client in tui.clients:
            client.names = ("tiny", "third")
        await press(tui, pilot, "ctrl+o")
        screen = tui.app.screen
        await tui.until(lambda: screen.query_one(OptionList).option_count == 3)
        await pilot.press(*"third", "enter")
        await tui.until(lambda: "fetching third: 1.0 GB of 4.0 GB" in tui.screen_text())
        await pilot.press("escape")
        await tui.until(lambda: "stopped: third goes on from there" in tui.screen_text())
        for client in tui.clients:
            client.names = ("tiny", "third")
        gate.set()
        await pilot.press("enter")
        await tui.until(lambda: tui.main.is_current)
        assert tui.opened.session.asked == "third"
        assert pulled == ["third", "third"]

    play(Tui(tmp_path), scene)


def test_comparing_by_keys(tmp_path: Path) -> None:
    gates = [threading.Event(), threading.Event()]

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+b")
        setup = tui.app.screen
        assert isinstance(setup, CompareSetup)
        setup.query_one(TextArea).text = "tiny\ntiny nonsense=1"
        await press(tui, pilot, "ctrl+s")
        assert "line 2: no parameter" in tui.screen_text()
        setup.query_one(TextArea).text = "tiny\nother temperature=0"
        await pilot.press("ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        await pilot.press(*"same?", "enter")
        await tui.until(lambda: all(c.opened.answering for c in tui.app.screen.query(Column)))
        for gate in gates:
            gate.set()
        await tui.settled(pilot)
        await tui.app.tick()
        assert tui.screen_text().count("TTFT 56 ms · 41.2 tok/s") == 2
        await pilot.press(*"more", "enter")
        await tui.until(lambda: all(c.opened.is_answering for c in tui.app.screen.query(Column)))
        await pilot.press("ctrl+c")
        await tui.settled(pilot)
        columns = list(tui.app.screen.query(Column))
        assert [len(c.opened.session.conversation.turns) for c in columns] == [2, 2]
        assert all(c.opened.session.conversation.turns[-1].stopped for c in columns)
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_current)
        assert len(tui.desk.listed) == 3

    never = threading.Event()
    scripts = [("a", gates[0], answer()), ("b", gates[1], answer()), ("c", never), ("d", never)]
    play(Tui(tmp_path, *scripts), scene)


async def save(tui: Tui, pilot: Pilot[None], path: Path) -> None:
    await press(tui, pilot, "ctrl+s")
    tui.app.screen.query_one(Input).value = str(path)
    await press(tui, pilot, "enter")
    await tui.until(lambda: f"written to {path}" in told(tui))


def test_saving_as_a_file(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await save(tui, pilot, tmp_path / "x.md")
        await save(tui, pilot, tmp_path / "x.json")
        assert (
            "## You\n\nq\n\n## Answer\n\nre: q\n\n*tiny · TTFT" in (tmp_path / "x.md").read_text()
        )
        await tui.ask(pilot, f"/export {tmp_path / 'x.md'}")
        await tui.until(lambda: "there already" in told(tui))
        await tui.ask(pilot, f"/export {tmp_path}/none/x.md")
        await tui.until(lambda: "cannot write" in told(tui))
        await tui.ask(pilot, "/clear")
        await tui.until(lambda: turns(tui) == [])
        await tui.ask(pilot, f"/load {tmp_path / 'x.json'}")
        await tui.until(lambda: [t.answer for t in turns(tui)] == ["re: q"])

    play(Tui(tmp_path), scene)


def test_the_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nprintf "%s and more\\n" "$(cat "$1")" > "$1"\n')
    script.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"begun")
        monkeypatch.setenv("EDITOR", os.fspath(script))
        from localgen.tui.chat.editor import edited

        assert edited("begun") == "begun and more"
        await pilot.press("ctrl+g")  # a test has no terminal to lend
        assert "cannot be lent" in told(tui)
        assert tui.prompt.text == "begun"

    play(Tui(tmp_path), scene)


def test_copying_the_answer(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+y")
        assert tui.app.clipboard == ""
        await tui.ask(pilot, "q")
        await pilot.press("ctrl+y")
        assert tui.app.clipboard == "re: q"

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/nonsense", "no command /nonsense"),
        ("/sw", "did you mean /switch?"),
        ("/undo", "cannot undo 1 of 0 turns"),
        ("/switch nobody", "no session nobody"),
        ("/set parameter top_k x", "give a whole number"),
        ("/show parameters", "temperature"),
        ("/show info", "llama 6M F16"),
        ("/load", "saved chats: none yet"),
    ],
)
def test_commands(tmp_path: Path, line: str, expected: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, line)
        await pilot.press("enter")
        await tui.until(lambda: expected in told(tui))

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    ("line", "screen"),
    [
        ("/help", KeyHelp),
        ("/rename", AskText),
        ("/delete", Confirm),
        ("/search x", SearchScreen),
        ("/export", AskText),
        ("/compare", CompareSetup),
        ("/model", ModelPicker),
    ],
)
def test_commands_that_ask(tmp_path: Path, line: str, screen: type) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, line)
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, screen))
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_current)

    play(Tui(tmp_path), scene)


def test_bye_leaves(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/bye", "enter")
        await tui.until(lambda: not tui.app.is_running)

    play(Tui(tmp_path), scene)


def test_every_key_is_in_the_help(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        keys = dict(tui.app._known_keys(tui.main))  # type: ignore[arg-type]
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
        assert isinstance(tui.app.screen, TooSmall)
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert tui.main.is_current
        assert tui.prompt.text == "typed"

    play(Tui(tmp_path), scene)
