"""Each key of the TUI."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
from scripted_client import ScriptedClient, answer
from textual.pilot import Pilot
from textual.widgets import Input, Static, TextArea
from tui_chats import Tui, notice_text, play, press, turns

from localgen.backends.errors import ServerUnavailable
from localgen.backends.sampling_params import SamplingParams
from localgen.chat.conversation import Turn
from localgen.client import TextDelta
from localgen.tui.base_app import KeyHelp
from localgen.tui.chat.compare import CompareDialog
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_list import SessionList
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.text_dialog import TextInputDialog
from localgen.tui.chat.transcript import Transcript
from localgen.tui.gauges.panel import GaugePanel
from localgen.tui.widgets.dialog import ConfirmDialog


def test_ctrl_c_stops_then_leaves(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await press(tui, pilot, "ctrl+c")
        assert turns(tui) == [Turn("q", "half", True, "", "stopped")]
        assert "stopped" in tui.screen_text()
        await pilot.press("ctrl+c")
        assert "Ctrl+Q quits" in notice_text(tui)
        assert tui.app.is_running
        await pilot.press("ctrl+c")
        await tui.until(lambda: not tui.app.is_running)

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_ctrl_c_copies_what_is_selected(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"copy", "shift+home", "ctrl+c")
        assert tui.app.clipboard == "copy"
        assert "Ctrl+Q" not in notice_text(tui)

    play(Tui(tmp_path), scene)


def test_ctrl_q_asks_only_while_answers_are_written(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        assert "1 answer is still being written" in tui.screen_text()
        await pilot.press("n")
        await pilot.pause()
        assert tui.opened.is_answering
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.press("y")
        await tui.until(lambda: not tui.app.is_running)
        assert tui.store.read(tui.opened.id).conversation.turns[0].answer == "half"

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_ctrl_r_asks_again(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert "Ctrl+R asks again" in tui.screen_text()
        assert "interrupted: the server went away" in tui.screen_text()
        await press(tui, pilot, "ctrl+r")
        assert [turn.answer for turn in turns(tui)] == ["whole"]
        assert "half" not in tui.screen_text()

    gone = ServerUnavailable("the server went away")
    play(Tui(tmp_path, ("half", gone), ("whole", answer())), scene)


def test_keys_open_and_switch_sessions(tmp_path: Path) -> None:
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
        assert isinstance(tui.app.screen, TextInputDialog)
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
        await tui.until(lambda: tui.main.current_session and tui.opened.id != session)
        assert session not in [listed.id for listed in tui.manager.summaries]
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
        assert isinstance(tui.app.screen, TextInputDialog)
        await press(tui, pilot, "escape")
        for key in ("d", "delete"):
            await press(tui, pilot, key)
            assert isinstance(tui.app.screen, ConfirmDialog)
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
        await tui.until(lambda: len(screen._items) == 2)  # the prompt's turn holds the answer too
        await pilot.press("down", "up", "enter")
        await tui.until(lambda: tui.opened.id == wanted)
        await press(tui, pilot, "ctrl+f", "escape")
        assert tui.main.is_active

    tui = Tui(tmp_path, *[(f"answer {n}", answer()) for n in range(2)])
    tui.scripts[1] = ("and needle 1 too", answer())
    tui.scripts.insert(1, ("x", answer()))
    play(tui, scene)


def test_keys_change_settings(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        panel = tui.main.query_one(SettingsPanel)
        assert panel.display
        await pilot.press(*"0.5", "enter")
        await tui.wait_until_idle(pilot)
        assert tui.opened.chat.options.params == SamplingParams(temperature=0.5)
        await pilot.press("down", *"many", "enter")
        await tui.wait_until_idle(pilot)
        fault = panel.query_one(".error", Static)
        assert "top_k 'many': give a whole number" in str(fault.content)
        await pilot.press("ctrl+u", *"3", "up")
        await tui.wait_until_idle(pilot)
        assert tui.opened.chat.options.params.top_k == 3
        assert not panel.query(".error")
        panel.query_one("#system", TextArea).focus()
        await pilot.press(*"be brief", "tab")
        await tui.wait_until_idle(pilot)
        assert tui.opened.chat.conversation.system == "be brief"
        panel.query_one("#set-ctx Input").focus()
        await pilot.press(*"12x", "escape")
        await tui.wait_until_idle(pilot)
        assert not panel.display
        assert tui.prompt.has_focus
        assert tui.store.read(tui.opened.id).params.top_k == 3

    play(Tui(tmp_path), scene)


def test_keys_fold_blocks(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        gauges, sessions = tui.main.query_one(GaugePanel), tui.main.query_one(SessionList)
        assert gauges.display
        assert sessions.display
        await press(tui, pilot, "f6", "f7")
        assert not gauges.display
        assert not sessions.display
        await press(tui, pilot, "f6", "f7")
        assert gauges.display
        assert sessions.display

    play(Tui(tmp_path), scene)


def test_key_unfolds_reasoning(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert "reasoning, 2 words" in tui.screen_text()
        assert "deep thought" not in tui.screen_text()
        await press(tui, pilot, "f5")
        assert "deep thought" in tui.screen_text()
        await press(tui, pilot, "f5")
        assert "deep thought" not in tui.screen_text()

    play(
        Tui(tmp_path, (TextDelta("", 1, "deep "), TextDelta("", 2, "thought"), "a", answer())),
        scene,
    )


def test_keys_scroll(tmp_path: Path) -> None:
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
        assert len(transcript.shown_turns) == 12
        assert "3 earlier turns" in transcript.text
        await press(tui, pilot, "ctrl+home")
        assert len(transcript.shown_turns) == 15
        assert transcript.scroll_y == 0
        await press(tui, pilot, "ctrl+end")
        assert transcript.scroll_y > 0

    play(Tui(tmp_path), scene)


async def save(tui: Tui, pilot: Pilot[None], path: Path) -> None:
    await press(tui, pilot, "ctrl+s")
    tui.app.screen.query_one(Input).value = str(path)
    await press(tui, pilot, "enter")
    await tui.until(lambda: f"written to {path}" in notice_text(tui))


def test_save_writes_a_file(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await save(tui, pilot, tmp_path / "x.md")
        await save(tui, pilot, tmp_path / "x.json")
        assert (
            "## You\n\nq\n\n## Answer\n\nre: q\n\n*tiny · 41.2 tok/s"
            in (tmp_path / "x.md").read_text()
        )
        await tui.ask(pilot, f"/export {tmp_path / 'x.md'}")
        await tui.until(lambda: "already exists" in notice_text(tui))
        await tui.ask(pilot, f"/export {tmp_path}/none/x.md")
        await tui.until(lambda: "cannot write" in notice_text(tui))
        await tui.ask(pilot, "/clear")
        await tui.until(lambda: turns(tui) == [])
        await tui.ask(pilot, f"/load {tmp_path / 'x.json'}")
        await tui.until(lambda: [t.answer for t in turns(tui)] == ["re: q"])

    play(Tui(tmp_path), scene)


def test_key_copies_the_answer(tmp_path: Path) -> None:
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
        ("/show info", "llama 6M F16"),
        ("/load", "saved chats: none yet"),
    ],
)
def test_commands_show_a_message(tmp_path: Path, line: str, expected: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, line)
        await pilot.press("enter")
        await tui.until(lambda: expected in notice_text(tui))

    play(Tui(tmp_path), scene)


def is_open(tui: Tui, screen: type) -> bool:
    return isinstance(tui.app.screen, screen)


DIALOGS = {
    "/help": KeyHelp,
    "/rename": TextInputDialog,
    "/delete": ConfirmDialog,
    "/search x": SearchScreen,
    "/export": TextInputDialog,
    "/compare": CompareDialog,
    "/model": ModelPicker,
}


def test_commands_open_a_dialog(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for line, screen in DIALOGS.items():
            await tui.type(pilot, line)
            await pilot.press("enter")
            await tui.until(partial(is_open, tui, screen))
            await pilot.press("escape")
            await tui.until(lambda: tui.main.is_active)

    play(Tui(tmp_path), scene)


def test_bye_leaves(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/bye", "enter")
        await tui.until(lambda: not tui.app.is_running)

    play(Tui(tmp_path), scene)


def test_ctrl_x_ends_the_reasoning_or_cuts_the_selection(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+x")
        assert "does not reason now" in notice_text(tui)
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await tui.until(lambda: "Ctrl+X answers now" in tui.screen_text())
        await pilot.press("ctrl+x")
        client = tui.opened.chat.client
        assert isinstance(client, ScriptedClient)
        await tui.until(lambda: client.record.answers_now == 1)
        await pilot.press(*"cut", "shift+home", "ctrl+x")
        assert tui.app.clipboard == "cut"
        assert tui.prompt_text == ""
        gate.set()
        await tui.wait_until_idle(pilot)
        assert client.record.answers_now == 1

    play(Tui(tmp_path, (TextDelta("", 1, "hm"), gate, "done", answer())), scene)
