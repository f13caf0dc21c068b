"""Tool calls in the TUI: the question, its keys, what is typed meanwhile, what is stored."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_client import answer
from textual import events
from textual.pilot import Pilot
from tui_chats import Tui, notice_text, play, turns

from localgen.backends.types import ToolCall
from localgen.chat.conversation import ToolStep
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, ROUNDS_NOTICE, ChatTools
from localgen.mcp_tools.connections import McpConnections
from localgen.mcp_tools.server_file import McpServer, add_server
from localgen.tui.chat import tool_question
from localgen.tui.chat.prompt import Prompt

PROGRAM = str(Path(__file__).parent / "mcp_server.py")
ADD = ToolCall("id", "test__add", '{"a": 17, "b": 25}')


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers count from when a question is drawn."""
    monkeypatch.setattr(tool_question, "SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def connections() -> Iterator[McpConnections]:
    with contextlib.closing(McpConnections(start_timeout_s=600.0)) as made:
        yield made


@pytest.fixture
def tools(
    connections: McpConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ChatTools:
    (tmp_path / "config").mkdir(mode=0o700)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))
    add_server(McpServer("test", (sys.executable, PROGRAM, "stdio")))
    made = ChatTools(connections)
    made.add("test")
    return made


def tui_with(tools: ChatTools, folder: Path, *scripts: object) -> Tui:
    made = Tui(folder, *scripts)  # type: ignore[arg-type]
    made.context = made.manager.context = replace(made.context, tools=tools)
    return made


def calling(*calls: ToolCall, text: str = "Let me see.") -> tuple[object, ...]:
    return (text, answer(finish_reason="tool_calls", tool_calls=calls))


async def ask(tui: Tui, pilot: Pilot[None], text: str) -> None:
    """Send a prompt and wait for the question."""
    await tui.type(pilot, text)
    await pilot.press("enter")
    await drawn_question(tui, pilot)


async def drawn_question(tui: Tui, pilot: Pilot[None], before: object = None) -> None:
    """Wait until a question other than `before` is on the screen."""
    await tui.until(lambda: tui.main.shown_question not in (None, before))
    await tui.until(lambda: tui.main._tool_question.is_drawn)
    await pilot.pause()


def test_a_call_is_asked_for_run_and_stored(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        assert "tools of test (10); /mcp lists them" in tui.screen_text()
        await ask(tui, pilot, "17 + 25?")
        screen = tui.screen_text()
        assert "Alt+Y\N{NO-BREAK SPACE}Run" in screen
        assert 'run test.add? {"a": 17, "b": 25}' in screen
        assert "Let me see." in screen
        await pilot.press("alt+y")
        await tui.wait_until_idle(pilot)
        assert tui.main.shown_question is None
        step = ToolStep("Let me see.", "", (ADD,), ("42",))
        (turn,) = turns(tui)
        assert (turn.answer, turn.steps, turn.stopped) == ("It is 42.", (step,), False)
        assert tui.store.read(tui.opened.id).conversation.turns == (turn,)
        shown = tui.main._transcript.text
        order = [shown.index(text) for text in ("Let me see.", "▸ test.add", "42", "It is 42.")]
        assert order == sorted(order)

    play(tui_with(tools, tmp_path, calling(ADD), ("It is 42.", answer())), scene)


def test_what_is_typed_answers_no_question_and_is_kept(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        await pilot.press(*"yan", "space", *"more")
        assert tui.main.shown_question is not None
        assert tui.prompt_text == "yan more"
        await pilot.press("alt+r")
        await tui.wait_until_idle(pilot)
        assert tui.prompt_text == "yan more"
        assert turns(tui)[0].steps[0].results == ("[not run: the user refused this call]",)

    play(tui_with(tools, tmp_path, calling(ADD), ("ok", answer())), scene)


def test_a_key_answers_no_question_that_is_not_drawn_yet(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        first = tui.main.shown_question
        # both keys wait in the queue of the app
        for _ in range(2):
            tui.app.post_message(events.Key("alt+y", None))
        await drawn_question(tui, pilot, before=first)
        assert 'run test.echo? {"text": "seen"}' in tui.screen_text()
        early = events.Key("alt+y", None)
        early.time = 0.0  # typed before, and processed only now
        tui.app.post_message(early)
        await tui.until(lambda: "has just appeared" in notice_text(tui))
        await pilot.pause()
        assert tui.main.shown_question is not None
        await pilot.press("alt+r")
        await tui.wait_until_idle(pilot)
        assert "has just appeared" not in notice_text(tui)
        assert turns(tui)[0].steps[0].results == ("42", "[not run: the user refused this call]")

    calls = calling(ADD, ToolCall("2", "test__echo", '{"text": "seen"}'))
    play(tui_with(tools, tmp_path, calls, ("ok", answer())), scene)


def test_a_key_or_a_click_right_after_the_question_is_asked_for_again(
    tools: ChatTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(tool_question, "SETTLE_S", float("inf"))
        await ask(tui, pilot, "hi")
        await pilot.press("alt+y")
        assert "has just appeared" in notice_text(tui)
        tui.main.show_message("")
        await pilot.click("ToolQuestion Static", offset=(3, 0))
        assert "has just appeared" in notice_text(tui)
        assert tui.main.shown_question is not None
        monkeypatch.setattr(tool_question, "SETTLE_S", 0.0)
        await pilot.press("alt+y")
        await tui.wait_until_idle(pilot)
        assert turns(tui)[0].steps[0].results == ("42",)

    play(tui_with(tools, tmp_path, calling(ADD), ("ok", answer())), scene)


def test_a_key_that_is_held_down_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_question, "SETTLE_S", 0.5)
    box = tool_question.ToolQuestion()
    assert not box.accepts(1e12)  # not drawn
    box._unsettled_s = 100.0
    repeats = [100.4 + 0.03 * number for number in range(100)]
    assert not any(map(box.accepts, repeats))
    assert box.accepts(repeats[-1] + 0.5)


def test_always_is_for_the_session(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "one")
        await pilot.press("alt+a")
        await tui.wait_until_idle(pilot)
        await tui.ask(pilot, "two")
        assert [turn.steps[0].results for turn in turns(tui)] == [("42",), ("42",)]
        await tui.type(pilot, "/clear")
        await pilot.press("enter")
        await tui.until(lambda: not turns(tui))
        await ask(tui, pilot, "again")
        await pilot.press("alt+a")
        await tui.wait_until_idle(pilot)
        await tui.open_new(pilot)
        await ask(tui, pilot, "three")  # asked for again
        await pilot.press("ctrl+c")
        await tui.wait_until_idle(pilot)

    done = ("ok", answer())
    scripts = (*(calling(ADD), done) * 3, calling(ADD))
    play(tui_with(tools, tmp_path, *scripts), scene)


def test_ctrl_c_at_the_question_stops_the_answer(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        await pilot.press("ctrl+c")
        await tui.wait_until_idle(pilot)
        (turn,) = turns(tui)
        assert turn.stopped
        assert turn.steps[0].results == ("[not run: the user stopped the answer]",)
        await tui.ask(pilot, "more")
        assert turns(tui)[1].answer == "fine"

    play(tui_with(tools, tmp_path, calling(ADD), ("fine", answer())), scene)


def test_ctrl_c_ends_a_running_call(tools: ChatTools, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    sleep = json.dumps({"seconds": 1, "begun": str(begun)})

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        await pilot.press("alt+y")
        await tui.until(begun.exists)
        await tui.until(
            lambda: "test.sleep is running; Ctrl+C stops waiting for it" in tui.screen_text()
        )
        await pilot.press("ctrl+c")
        await tui.wait_until_idle(pilot)
        (result,) = turns(tui)[0].steps[0].results
        assert "stopped waiting for this call: the server may still carry it out" in result

    play(tui_with(tools, tmp_path, calling(ToolCall("1", "test__sleep", sleep))), scene)


def test_a_question_waits_in_its_session(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        first = tui.opened
        await tui.open_new(pilot)
        tui.app.tick()
        assert tui.main.shown_question is None
        assert "asks you" in tui.screen_text()  # in the list of sessions
        await pilot.press("alt+y")
        assert "no tool waits" in notice_text(tui)
        assert first.question is not None
        await pilot.press("ctrl+up")
        await drawn_question(tui, pilot)
        await pilot.press("alt+y")
        await tui.wait_until_idle(pilot)
        assert turns(tui)[0].answer == "ok"

    play(tui_with(tools, tmp_path, calling(ADD), ("ok", answer())), scene)


def test_a_click_answers(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        await pilot.click("ToolQuestion Static", offset=(3, 0))
        await tui.wait_until_idle(pilot)
        assert turns(tui)[0].steps[0].results == ("42",)

    play(tui_with(tools, tmp_path, calling(ADD), ("ok", answer())), scene)


def test_leaving_at_the_question_keeps_the_turn(tools: ChatTools, tmp_path: Path) -> None:
    tui = tui_with(tools, tmp_path, calling(ADD))
    opened = tui.manager.open_empty()
    opened.ask("hi")
    while opened.question is None:
        time.sleep(0.01)
    session_id = opened.id
    tui.manager.close()
    turn = tui.store.read(session_id).conversation.turns[0]
    tui.close()
    assert (turn.stopped, turn.steps[0].calls) == (True, (ADD,))


def test_escapes_of_a_result_have_no_effect(tools: ChatTools, tmp_path: Path) -> None:
    evil = json.dumps({"text": "\x1b]0;title\x07\x1b[2J\nsecond"})

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        await pilot.press("alt+y")
        await tui.wait_until_idle(pilot)
        assert r"\x1b]0;title\x07\x1b[2J" in tui.main._transcript.text
        assert not {"\x1b", "\x07"} & set(tui.screen_text())

    play(
        tui_with(tools, tmp_path, calling(ToolCall("1", "test__echo", evil)), ("ok", answer())),
        scene,
    )


def test_long_arguments_can_be_scrolled_to_their_end(tools: ChatTools, tmp_path: Path) -> None:
    long = json.dumps({"text": "word " * 300 + "rm -rf ~ " + "word " * 300})

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "hi")
        box = tui.main._tool_question
        assert box.size.height <= 10
        assert box.max_scroll_y > 0
        assert "Alt+Y\N{NO-BREAK SPACE}Run" in tui.screen_text()
        assert "rm -rf ~" not in tui.screen_text()
        box.focus()
        seen = ""
        for _ in range(10):
            seen += tui.screen_text()
            await pilot.press("pagedown")
            await pilot.wait_for_animation()
        assert "rm -rf ~" in seen
        await pilot.press("alt+r")
        await tui.wait_until_idle(pilot)

    play(
        tui_with(tools, tmp_path, calling(ToolCall("1", "test__echo", long)), ("ok", answer())),
        scene,
        size=(80, 24),
    )


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_screen_of_a_question(
    tools: ChatTools,
    tmp_path: Path,
    snap_compare: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    write = ToolCall("id", "test__echo", json.dumps({"text": "one line\nand another"}))
    tui = tui_with(tools, tmp_path, calling(ADD), calling(write, text="Now the rest."))

    async def before(pilot: Pilot[None]) -> None:
        await tui.until(lambda: tui.main.current_session)
        tui.main.query_one(Prompt).cursor_blink = False
        await ask(tui, pilot, "17 + 25?")
        first = tui.main.shown_question
        await pilot.press("alt+y")
        await drawn_question(tui, pilot, before=first)
        await tui.type(pilot, "typed meanwhile")
        await tui.until(lambda: "Now the rest." in tui.main._transcript.text)
        await pilot.pause()

    try:
        assert snap_compare(tui.app, terminal_size=size, run_before=before)
    finally:
        tui.close()


def test_mcp_command_in_the_tui(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "/mcp off test")
        await pilot.press("enter")
        await tui.until(lambda: "not offered any more" in notice_text(tui))
        assert tui.opened.chat.tools.offered == ()
        await tui.ask(pilot, "hi")
        await tui.open_new(pilot)
        assert len(tui.opened.chat.tools.offered) == 10

    play(tui_with(tools, tmp_path), scene)


def test_ctrl_c_ends_the_start_of_a_server(tools: ChatTools, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    hang = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    add_server(McpServer("hang", (sys.executable, "-c", hang)))

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "/mcp hang")
        await pilot.press("enter")
        await tui.until(begun.exists)
        await pilot.press("ctrl+c")
        await tui.until(lambda: notice_text(tui) == "stopped")
        await tui.ask(pilot, "hi")
        assert turns(tui)[0].answer == "ok"
        begun.unlink()
        await tui.type(pilot, "/mcp hang")
        await pilot.press("enter")
        await tui.until(begun.exists)  # and quitting does not wait for it

    play(tui_with(tools, tmp_path, ("ok", answer())), scene)


def test_the_last_round_of_calls_is_said(tools: ChatTools, tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await ask(tui, pilot, "one")
        await pilot.press("alt+a")
        await tui.wait_until_idle(pilot)
        assert "rounds of tool calls" not in tui.main._transcript.text
        await tui.ask(pilot, "many")
        assert ROUNDS_NOTICE in turns(tui)[1].summary.splitlines()
        assert ROUNDS_NOTICE in " ".join(tui.main._transcript.text.split())
        assert (len(turns(tui)[1].steps), turns(tui)[1].answer) == (MAX_ROUNDS, "so")

    rounds = [calling(ADD, text="")] * MAX_ROUNDS
    play(
        tui_with(tools, tmp_path, calling(ADD), ("ok", answer()), *rounds, ("so", answer())),
        scene,
    )


def test_a_comparison_offers_no_tools(tools: ChatTools, tmp_path: Path) -> None:
    from localgen.tui.chat.compare import CompareVariant

    tui = tui_with(tools, tmp_path)
    opened = tui.manager.open_empty()
    assert opened.chat.tools.offered
    for made in tui.manager.compare(
        opened, [CompareVariant("tiny", opened.chat.options.params, "tiny")]
    ):
        assert made.chat.tools.offered == ()
    tui.close()
