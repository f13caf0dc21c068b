"""Choosing a model in the TUI: installed models, downloads, failed loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList
from tui_chats import PacedClient, Tui, play, press, turns

from localgen.backends.errors import LoadFailed
from localgen.client import pullable_models
from localgen.client.pullable_models import PullableModel
from localgen.tui.chat.model_picker import ModelPicker


def test_choosing_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pullable_models,
        "pullable_models",
        lambda: [PullableModel("big", "Big 70B", 40_000_000_000, fits=False)],
    )

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        screen = tui.app.screen
        assert isinstance(screen, ModelPicker)
        await tui.until(lambda: screen.query_one(OptionList).option_count == 3)
        assert "does not fit here · not downloaded" in tui.screen_text()
        await pilot.press(*"oth", "enter")
        await tui.until(lambda: tui.main.is_active)
        assert tui.opened.chat.requested_model == "other"
        await tui.ask(pilot, "q")
        assert tui.clients[0].record.asked[-1].model == "other"
        await tui.ask(pilot, "/model nonsense")
        await tui.until(lambda: "Model 'nonsense' not found" in tui.screen_text())
        await press(tui, pilot, "escape")
        assert tui.main.is_active
        assert tui.opened.chat.requested_model == "other"

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

    monkeypatch.setattr(
        pullable_models, "pullable_models", lambda: [PullableModel("third", "Third", 4_000_000_000)]
    )
    monkeypatch.setattr(pullable_models, "can_pull", lambda name: name == "third")
    monkeypatch.setattr(pullable_models, "pull_model", pull)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for client in tui.clients:
            client.names = ("tiny", "third")
        await press(tui, pilot, "ctrl+o")
        screen = tui.app.screen
        await tui.until(lambda: screen.query_one(OptionList).option_count == 3)
        await pilot.press(*"third", "enter")
        await tui.until(lambda: "downloading third: 1.0 GB of 4.0 GB" in tui.screen_text())
        await pilot.press("escape")
        await tui.until(lambda: "stopped: downloading third again resumes it" in tui.screen_text())
        for client in tui.clients:
            client.names = ("tiny", "third")
        gate.set()
        await pilot.press("enter")
        await tui.until(lambda: tui.main.is_active)
        assert tui.opened.chat.requested_model == "third"
        assert pulled == ["third", "third"]

    play(Tui(tmp_path), scene)


@pytest.fixture(autouse=True)
def no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pullable_models, "pullable_models", list)


def test_up_and_down_choose_while_a_name_is_typed(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        found = tui.app.screen.query_one(OptionList)
        await tui.until(lambda: found.option_count == 2)
        assert found.highlighted == 0
        await pilot.press("down")
        assert found.highlighted == 1
        await pilot.press("up")
        assert found.highlighted == 0
        await pilot.press("down", "enter")
        await tui.until(lambda: tui.main.is_active)
        assert tui.opened.chat.requested_model == "other"

    play(Tui(tmp_path), scene)


def test_a_name_that_is_not_in_the_list(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        await tui.until(lambda: tui.app.screen.query_one(OptionList).option_count == 2)
        await pilot.press(*"oths")
        await tui.until(lambda: "Enter tries oths" in tui.screen_text())
        await pilot.press("backspace")
        await tui.until(lambda: tui.app.screen.query_one(OptionList).option_count == 1)
        assert "Enter tries" not in tui.screen_text()
        await pilot.press("s", "enter")
        await tui.until(lambda: "Model 'oths' not found" in tui.screen_text())
        await pilot.press("backspace")
        await tui.until(lambda: tui.app.screen.query_one(OptionList).option_count == 1)
        assert "Model 'oths' not found" in tui.screen_text()

    play(Tui(tmp_path), scene)


FAULT = "other.gguf is damaged: \x1b[31m[red]tensor 3[/] ends after the file does"


def test_a_model_that_does_not_load_is_told_in_the_picker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LoadFailed(FAULT)

    monkeypatch.setattr(PacedClient, "load", fail)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        await tui.until(lambda: tui.app.screen.query_one(OptionList).option_count == 2)
        await pilot.press(*"other", "enter")
        await tui.until(lambda: "other.gguf is damaged" in tui.screen_text())
        assert r"\x1b[31m[red]tensor 3[/]" in tui.screen_text()
        assert "\x1b" not in tui.screen_text()
        await press(tui, pilot, "escape")
        assert tui.main.is_active
        assert tui.opened.chat.requested_model is None

    play(Tui(tmp_path), scene)


def test_a_prompt_to_a_model_that_does_not_load_stays_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LoadFailed(FAULT)

    load = PacedClient.load
    monkeypatch.setattr(PacedClient, "load", fail)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert "interrupted: other.gguf is damaged" in tui.screen_text()
        assert "\x1b" not in tui.screen_text()
        assert "q" in [turn.prompt for turn in turns(tui)]
        monkeypatch.setattr(PacedClient, "load", load)
        await press(tui, pilot, "ctrl+r")
        await tui.wait_until_idle(pilot)
        assert [turn.answer for turn in turns(tui)] == ["re: q"]

    play(Tui(tmp_path), scene)
