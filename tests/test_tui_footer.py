"""The footer shows whole keys only, as many as fit."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from rich.cells import cell_len
from scripted_client import answer
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey
from tui_chats import Tui, play

from localgen.tui.widgets.footer import KeyFooter

WORDS = ("Timeline", "Cancel", "Sort", "見る", "Pause", "A longer one")


class _App(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(f"f{number}", f"act({number})", word) for number, word in enumerate(WORDS, 1)
    ]

    def __init__(self, *, compact: bool) -> None:
        super().__init__()
        self._compact = compact

    def action_act(self, number: int) -> None:
        """The footer shows one key per action."""

    def compose(self) -> ComposeResult:
        yield KeyFooter(compact=self._compact)


@pytest.mark.parametrize("compact", [False, True])
def test_no_key_is_cut(compact: bool) -> None:
    async def run() -> None:
        app = _App(compact=compact)
        async with app.run_test(size=(120, 8)) as pilot:
            await pilot.pause()
            assert shown(app) == list(WORDS)
            for columns in (72, 60, 44, 32, 90, 120):
                await pilot.resize_terminal(columns, 8)
                await pilot.pause()
                keys = list(app.query(FooterKey))
                palette = keys.pop()
                assert palette.region.right >= columns - 1
                for key in keys:
                    text = cell_len(key.render().plain.rstrip())
                    assert key.region.x + text <= palette.region.x
                assert len(keys) == len(WORDS) or columns < 90
            assert shown(app) == list(WORDS)
            await pilot.resize_terminal(44, 8)
            await pilot.pause()
            assert 1 <= len(shown(app)) < len(WORDS)

    asyncio.run(run())


def shown(app: App[None]) -> list[str]:
    return [key.description for key in app.query(FooterKey)][:-1]


def test_stop_takes_the_place_of_quit_while_there_is_something_to_stop(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.until(lambda: "Quit" in shown(tui.app))
        assert "Stop" not in shown(tui.app)
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: "Stop" in shown(tui.app))
        assert "Quit" not in shown(tui.app)
        gate.set()
        await tui.wait_until_idle(pilot)
        await tui.until(lambda: "Quit" in shown(tui.app))
        assert "Stop" not in shown(tui.app)

    play(Tui(tmp_path, ("Yes", gate, answer())), scene)
