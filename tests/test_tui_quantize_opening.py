"""Opening the quantize screen: commands, help, small terminals, and where it is rejected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static
from tui_quantize import Quantizing, play, wait_until_estimated

from localgen.backends.errors import LoadFailed
from localgen.tui.base_app import KeyHelp
from localgen.tui.quantize.screen import QuantizeScreen

pytestmark = pytest.mark.usefixtures("two_originals")


def test_quantize_opens_by_command_and_shows_help(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await pilot.press("f1")
        await tui.until(lambda: isinstance(tui.app.screen, KeyHelp))
        await pilot.pause()
        assert "Run" in tui.screen_text()
        await pilot.press("escape", "escape")
        await tui.until(lambda: tui.main.is_shown)
        await pilot.press(*"/quantize", "enter")
        await tui.until(lambda: isinstance(tui.app.screen, QuantizeScreen))
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_shown)
        await pilot.press("ctrl+p", *"quantize a")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, QuantizeScreen))

    play(Quantizing(tmp_path), scene)


def test_what_was_chosen_is_there_when_the_screen_is_opened_again(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="gptq", bits=3, out="mine")
        await wait_until_estimated(tui, pilot, 2)
        chosen = tui.screen._form_panel.form
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_shown)
        await pilot.press("f10")
        await tui.until(lambda: isinstance(tui.app.screen, QuantizeScreen))
        await wait_until_estimated(tui, pilot, 3)
        assert tui.screen._form_panel.form == chosen

    play(Quantizing(tmp_path), scene)


def test_pages_scroll_where_there_is_little_room(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        body = tui.screen.query_one("#body")
        await pilot.press("pagedown")
        await pilot.pause()
        assert body.scroll_y > 0
        assert "3.21 GB free" in tui.screen_text()
        await pilot.press("pageup")
        await pilot.pause()
        assert body.scroll_y == 0

    play(Quantizing(tmp_path), scene, (60, 20))


def refused(tui: Quantizing, message: str) -> None:
    async def run() -> None:
        try:
            async with tui.running() as pilot:
                await pilot.press("f10")
                told = tui.main.query_one("#message", Static)
                await tui.until(lambda: message in str(told.content))
                assert tui.main.is_shown
        finally:
            tui.close()

    asyncio.run(run())


def test_remote_server_is_rejected(tmp_path: Path) -> None:
    refused(Quantizing(tmp_path, is_elsewhere=True), "on a remote server")


def test_missing_torch_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LoadFailed("quantize needs torch: pip install 'localgen[quant]'")

    monkeypatch.setattr("localgen.tui.quantize.runner.require_packages", missing)
    refused(Quantizing(tmp_path), "pip install 'localgen[quant]'")
