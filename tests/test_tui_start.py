"""What a new user sees, and prompts that wait for an answer to end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import PacedClient, Tui, notice_text, play, press, turns

from localgen.backends.errors import ServerUnavailable
from localgen.client import ModelCard, pullable_models
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.start_view import STARTERS
from localgen.tui.gauges.panel import GaugePanel


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40), (200, 60)])
def test_the_welcome_names_keys_questions_and_models(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.until(lambda: "big-8b" in tui.screen_text())
        shown = tui.screen_text()
        for text in ("What shall we talk about?", STARTERS[0], "Ctrl+O", "Ctrl+P", "4.9 GB"):
            assert text in shown
        assert "at most 180 tok/s" in shown
        assert not tui.main.query_one(GaugePanel).display

    play(Tui(tmp_path), scene, size)


def test_tab_puts_questions_into_the_empty_prompt(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for question in (*STARTERS, STARTERS[0]):
            await pilot.press("tab")
            assert tui.prompt.text == question
        await press(tui, pilot, "enter")
        assert tui.asked == [STARTERS[0]]
        await pilot.press("tab")
        assert tui.prompt.text == ""
        assert tui.main.query_one(GaugePanel).display

    play(Tui(tmp_path), scene)


async def click(tui: Tui, pilot: Pilot[None], text: str) -> None:
    await pilot.pause()
    lines = tui.screen_text().splitlines()
    row = next(at for at, line in enumerate(lines) if text in line)
    await pilot.click(offset=(lines[row].index(text) + 1, row))
    await pilot.pause()


def test_a_question_and_a_model_are_clicked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pullable_models, "can_pull", lambda name: False)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.until(lambda: "smollm2" in tui.screen_text())
        await pilot.press("x")
        await click(tui, pilot, STARTERS[1])
        await pilot.pause()
        assert tui.prompt.text == "x"  # what was typed stays
        assert tui.asked == []
        await pilot.press("backspace")
        await click(tui, pilot, STARTERS[1])
        await tui.wait_until_idle(pilot)
        assert tui.asked == [STARTERS[1]]
        await tui.open_new(pilot)
        for client in tui.clients:
            client.names = ("tiny", "smollm2")
        await click(tui, pilot, "smollm2   ")
        await tui.until(lambda: "now using smollm2" in notice_text(tui))

    play(Tui(tmp_path), scene)


def test_a_prompt_waits_for_the_answer_before_it(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "one")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        for prompt in ("two", "three"):
            await tui.type(pilot, prompt)
            await pilot.press("enter")
        await tui.until(lambda: "2 prompts queued" in tui.screen_text())
        assert tui.asked == ["one"]
        gate.set()
        await tui.until(lambda: tui.asked == ["one", "two", "three"])
        await tui.until(lambda: len(turns(tui)) == 3)
        assert "queued" not in tui.screen_text()

    play(Tui(tmp_path, ("a", gate, answer()), ("b", answer()), ("c", answer())), scene)


def test_stopping_gives_queued_prompts_back(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "one")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await tui.type(pilot, "two")
        await pilot.press("enter", *"since")
        await tui.until(lambda: "1 prompt queued" in tui.screen_text())
        await press(tui, pilot, "ctrl+c")
        assert tui.prompt_text == "two\nsince"
        assert tui.asked == ["one"]

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_a_failed_answer_gives_queued_prompts_back(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "one")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await tui.type(pilot, "two")
        await pilot.press("enter")
        await tui.until(lambda: "1 prompt queued" in tui.screen_text())
        gate.set()
        await tui.until(lambda: tui.prompt_text == "two")
        assert tui.asked == ["one"]

    play(Tui(tmp_path, ("half", gate, ServerUnavailable("gone"))), scene)


def test_queued_prompts_survive_quitting(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "one")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await tui.type(pilot, "two")
        await pilot.press("enter")
        await tui.until(lambda: "1 prompt queued" in tui.screen_text())
        session = tui.opened.id
        await pilot.press("ctrl+q", "y")
        await tui.until(lambda: not tui.app.is_running)
        assert tui.store.load_unsent_prompt(session) == "two"

    play(Tui(tmp_path, ("half", threading.Event())), scene)


def test_loading_is_in_the_background(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        gate = tui.gate_loads()
        await tui.type(pilot, "/model other")
        await pilot.press("enter")
        await tui.until(lambda: "loading 50%" in tui.screen_text())
        assert not isinstance(tui.app.screen, ModelPicker)
        await tui.type(pilot, "typed meanwhile")
        await pilot.press("enter")
        await tui.until(lambda: "1 prompt queued" in tui.screen_text())
        gate.set()
        await tui.until(lambda: tui.asked == ["typed meanwhile"])
        assert tui.opened.chat.requested_model == "other"

    play(Tui(tmp_path), scene)


def test_loading_is_stopped(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        gate = tui.gate_loads()
        await tui.type(pilot, "/model other")
        await pilot.press("enter")
        await tui.until(lambda: "loading 50%" in tui.screen_text())
        await pilot.press("ctrl+c")
        await tui.until(lambda: "stopped: the session keeps its model" in tui.screen_text())
        gate.set()
        assert tui.opened.chat.requested_model is None

    play(Tui(tmp_path), scene)


def test_a_server_with_several_models_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [ModelCard(name, "url", 0, "", "url") for name in ("one", "two")]
    monkeypatch.setattr(PacedClient, "models", lambda self: cards)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for client in tui.clients:
            client.names = ("one", "two")
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, ModelPicker))
        await pilot.press("escape")
        await tui.until(lambda: tui.prompt_text == "q")
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, ModelPicker))
        await tui.until(lambda: "two" in tui.screen_text())
        await pilot.press("down", "enter")
        await tui.until(lambda: tui.asked == ["q"])
        assert tui.clients[0].record.asked[-1].model == "two"

    play(Tui(tmp_path, url="http://host/v1"), scene)
