"""The TUI with a lost server or one of another version; texts that are never cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import top_script
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import Tui, play

import localgen
from localgen.backends.errors import ServerUnavailable
from localgen.tui.feed import SampleReceived, ServerLost
from localgen.tui.widgets.notice import Notice

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=str)
ENDS = pytest.mark.parametrize("size", [(60, 20), (250, 80)], ids=str)
GONE = "the server went away in mid-answer: see /home/me/.local/state/localgen/server.log"
LOST = ServerLost("no server answers on /run/user/1000/localgen/server.sock", 2.0, 3)
SCRIPT = ("Once upon a time there was", ServerUnavailable(GONE))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(localgen, "__version__", "1.2.3")


async def seen(tui: Tui, pilot: Pilot[None], version: str) -> None:
    """A server of that version."""
    last = top_script.snapshot(
        top_script.model(counters=top_script.counters(60.5)), version=version
    )
    tui.app.post_message(SampleReceived(top_script.reading(last=last)))
    await pilot.pause()


async def lost(tui: Tui, pilot: Pilot[None]) -> None:
    """Lose the server during an answer."""
    await seen(tui, pilot, "1.2.3")
    await tui.ask(pilot, "Tell me a story")
    tui.app.post_message(LOST)
    await pilot.pause()


async def another(tui: Tui, pilot: Pilot[None]) -> None:
    await seen(tui, pilot, "9.8.7")


@SIZES
def test_lost_server(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    snap_tui(lost, size, SCRIPT)


@SIZES
def test_other_server_version(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    snap_tui(another, size, SCRIPT)


def is_shown(tui: Tui, text: str) -> bool:
    """Whether all of the text is on the screen, wherever lines wrap."""
    return "".join(text.split()) in "".join(tui.screen_text().replace("│", " ").split())


@ENDS
def test_important_text_is_never_cut_off(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "Name a colour")
        await lost(tui, pilot)
        for whole in (
            "● LOST this machine",
            "no server answers on /run/user/1000/localgen/server.sock. Retrying in 2 s, F12: "
            "now. The next prompt starts a server.",
            "› Tell me a story",
            "Once upon a time there was",
            f"interrupted: {GONE}",
            "Ctrl+R asks again · the server went away",
            "Ask something, / for commands, ? for keys",
            "^q Quit",
            "F1 Keys",
            "▏^p palette",
        ):
            await tui.until(lambda whole=whole: is_shown(tui, whole), 20)  # type: ignore[misc]
        lines = tui.screen_text().split("\n")
        assert len(lines) == size[1]
        assert lines[-1].rstrip().endswith("▏^p palette")
        await another(tui, pilot)
        assert is_shown(
            tui,
            "The server runs localgen 9.8.7, this is 1.2.3: localgen stop ends it, the next prompt "
            "starts this version.",
        )
        await seen(tui, pilot, "1.2.3")
        assert not tui.main.query_one(Notice).display

    play(Tui(tmp_path, ("Blue.", answer()), SCRIPT), scene, size)


@ENDS
def test_notices_do_not_cover_the_prompt(tmp_path: Path, size: tuple[int, int]) -> None:
    tui = Tui(tmp_path)

    async def run() -> None:
        async with tui.app.run_test(size=size, notifications=True) as pilot:
            await tui.until(lambda: tui.main.current_session)
            await pilot.pause()
            before = tui.screen_text().split("\n")
            tui.app.notify("starting the server")
            await tui.until(lambda: "starting the server" in tui.screen_text(), 20)
            shown = tui.screen_text().split("\n")
            assert shown[0] == before[0]
            assert shown[-8:] == before[-8:]

    try:
        asyncio.run(run())
    finally:
        tui.close()


def test_another_server_may_be_of_any_version(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await another(tui, pilot)
        assert "● LIVE" in tui.screen_text()
        assert not tui.main.query_one(Notice).display

    play(Tui(tmp_path, url="http://far/v1"), scene)
