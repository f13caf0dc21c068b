"""The TUI by mouse alone, with clicks on visible texts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.cells import cell_len
from scripted_client import answer
from textual.events import MouseDown, MouseUp
from textual.pilot import Pilot
from textual.widgets import Input
from tui_chats import PacedClient, Tui, play, press

from localgen.client import TextDelta, pullable_models
from localgen.tui.base_app import KeyHelp
from localgen.tui.chat.compare import CompareDialog, CompareScreen
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.chat.text_dialog import TextInputDialog
from localgen.tui.gauges.panel import GaugePanel
from localgen.tui.widgets.command_palette import CommandPalette
from localgen.tui.widgets.dialog import ConfirmDialog, Dialog


@pytest.fixture(autouse=True)
def no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pullable_models, "pullable_models", list)


async def click(tui: Tui, pilot: Pilot[None], text: str) -> None:
    """Press and release at the first place of this text on the screen, as a terminal reports it.

    A pilot's own click targets the screen as the widget, and would close a dialog.
    """
    await pilot.pause()
    rows = tui.screen_text().split("\n")
    y = next(y for y, row in enumerate(rows) if text in row)
    x = cell_len(rows[y][: rows[y].index(text)]) + 1
    for event in (MouseDown, MouseUp):
        tui.app.post_message(event(None, x, y, 0, 0, 1, False, False, False))
        await pilot.pause()


def shows(tui: Tui, screen: type) -> Callable[[], bool]:
    return lambda: isinstance(tui.app.screen, screen)


FOOT = {
    "Model": ModelPicker,
    "Search": SearchScreen,
    "Compare": CompareDialog,
    "Keys": KeyHelp,
    "palette": CommandPalette,
}


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_foot_of_the_screen(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await pilot.press(*"typed")
        for text, screen in FOOT.items():
            await click(tui, pilot, text)
            await tui.until(shows(tui, screen))
            assert tui.prompt_text == "typed"
            await pilot.press("escape")
            await tui.until(lambda: tui.main.is_active)

    play(Tui(tmp_path), scene, size)


def test_settings_open_and_close(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await click(tui, pilot, "Settings")
        await tui.until(lambda: tui.main.query(SettingsPanel))
        panel = tui.main.query_one(SettingsPanel)
        assert panel.display
        await click(tui, pilot, "^t")
        assert not panel.display

    play(Tui(tmp_path), scene)


def test_sessions_are_made_opened_renamed_forked_and_deleted(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        first = tui.opened.id
        await click(tui, pilot, "^n")
        await tui.until(lambda: tui.opened.id != first)
        await tui.ask(pilot, "two")
        await click(tui, pilot, "one")
        await tui.until(lambda: tui.opened.id == first)
        assert tui.prompt.has_focus
        await click(tui, pilot, "rename")
        await tui.until(shows(tui, TextInputDialog))
        tui.app.screen.query_one(Input).value = "eins"
        await press(tui, pilot, "enter")
        assert tui.opened.name == "eins"
        assert tui.prompt.has_focus
        await click(tui, pilot, "fork")
        await tui.until(lambda: tui.opened.name == "eins (2)")
        await click(tui, pilot, "delete")
        await tui.until(shows(tui, ConfirmDialog))
        await click(tui, pilot, "Delete (y)")
        await tui.until(lambda: tui.opened.name != "eins (2)")

    play(Tui(tmp_path), scene)


def is_on_screen(tui: Tui, text: str) -> bool:
    return text in tui.screen_text()


PALETTE: dict[str, Callable[[Tui], bool]] = {
    "Copy the last answer": lambda tui: tui.app.clipboard == "re: one",
    "Show or hide gauges": lambda tui: not tui.main.query_one(GaugePanel).display,
    "Regenerate": lambda tui: tui.asked == ["one", "one"],
    "Export the transcript": lambda tui: isinstance(tui.app.screen, TextInputDialog),
}


def test_the_palette_has_a_place_to_click_for_what_has_a_key(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "one")
        for name, done in PALETTE.items():
            await click(tui, pilot, "palette")
            await tui.until(partial(is_on_screen, tui, name))
            await click(tui, pilot, name)
            await tui.until(partial(done, tui))
            await tui.wait_until_idle(pilot)

    play(Tui(tmp_path), scene, (120, 100))


def test_a_suggestion_is_taken(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/ex")
        await click(tui, pilot, "/export")
        assert tui.prompt.text == "/export "
        assert tui.prompt.has_focus

    play(Tui(tmp_path), scene)


def test_a_thought_is_unfolded(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await click(tui, pilot, "reasoning, 2 words")
        assert "deep thought" in tui.screen_text()

    play(Tui(tmp_path, (TextDelta("", 1, "deep thought"), "a", answer())), scene)


def test_models_and_settings_are_compared(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await click(tui, pilot, "Compare")
        await tui.until(shows(tui, CompareDialog))
        await pilot.click("#yes")
        await tui.until(shows(tui, CompareScreen))
        await click(tui, pilot, "Back")
        await tui.until(lambda: tui.main.is_active)

    play(Tui(tmp_path), scene)


def test_a_model_is_taken_from_the_list(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await click(tui, pilot, "^o Model")
        await tui.until(lambda: "4.9 GB" in tui.screen_text())
        await click(tui, pilot, "other")
        await tui.until(lambda: tui.main.is_active)
        assert tui.opened.chat.requested_model == "other"

    play(Tui(tmp_path), scene)


def test_a_click_beside_a_dialog_closes_it(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        name = tui.opened.name
        for key in ("f1", "f3", "f8", "ctrl+f", "ctrl+o", "ctrl+b"):
            await press(tui, pilot, key)
            await tui.until(shows(tui, Dialog))
            await pilot.click(offset=(1, 1))
            await tui.until(lambda: tui.main.is_active)
            assert tui.opened.name == name, key

    play(Tui(tmp_path), scene, (120, 40))


def test_what_comes_when_a_dialog_is_closed_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def late(*_: object) -> list[object]:
        gate.wait(10)
        return []

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(tui.manager, "search", late)
        monkeypatch.setattr(PacedClient, "models", late)
        for key in ("ctrl+f", "ctrl+o"):
            await press(tui, pilot, key)
            await tui.until(shows(tui, Dialog))
            screen = tui.app.screen
            await pilot.press("escape")
            await tui.until(lambda: tui.main.is_active)
            assert isinstance(screen, Dialog)
            assert not screen.is_open
        gate.set()
        await pilot.pause(0.2)
        assert tui.app.is_running

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(("answer_", "stays"), [("Stay (n)", True), ("Quit (y)", False)])
def test_leaving_is_confirmed(tmp_path: Path, answer_: str, stays: bool) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        await pilot.press("ctrl+q")
        await tui.until(shows(tui, ConfirmDialog))
        await click(tui, pilot, answer_)
        await tui.until(lambda: tui.main.is_active if stays else not tui.app.is_running)

    play(Tui(tmp_path, ("half", threading.Event())), scene)
