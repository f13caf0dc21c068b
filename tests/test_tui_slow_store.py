"""A slow or failing store does not block the keys."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import Tui, play

from localgen.chat.database import StoreFailed
from localgen.chat.session_store import SessionStore
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.session_manager import SessionManager


def test_keys_before_there_is_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, first = threading.Event(), SessionManager.open_empty

    def later(manager: SessionManager) -> ActiveSession:
        gate.wait()
        return first(manager)

    monkeypatch.setattr(SessionManager, "open_empty", later)
    tui = Tui(tmp_path)

    async def run() -> None:
        try:
            async with tui.app.run_test(size=(120, 40)) as pilot:
                await pilot.press("ctrl+y", "ctrl+r", "f3", "f4", "f8", "ctrl+o", "ctrl+t")
                await pilot.press("escape", *"typed", "enter")
                assert tui.prompt.text == "typed"
                gate.set()
                await tui.until(lambda: tui.main.current_session is not None)
                await tui.until(lambda: tui.asked == ["typed"])
                await tui.wait_until_idle(pilot)
                assert tui.prompt.text == ""
        finally:
            gate.set()
            tui.close()

    asyncio.run(run())


def test_a_store_that_fails_is_a_sentence_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, first, reload = [1], SessionManager.open_empty, SessionManager.reload_summaries

    def failing_first(manager: SessionManager) -> ActiveSession:
        if faults:
            raise StoreFailed(f"locked {faults.pop()}")
        return first(manager)

    monkeypatch.setattr(SessionManager, "open_empty", failing_first)

    def failing_reload(manager: SessionManager) -> None:
        if faults:
            raise StoreFailed(f"locked {faults.pop()}")
        reload(manager)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        assert "locked 1" in tui.screen_text()  # running() has waited for a second try
        monkeypatch.setattr(SessionManager, "reload_summaries", failing_reload)
        tui.prompt.insert("q")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream)
        faults.append(2)
        gate.set()
        await tui.until(lambda: not faults)
        await tui.until(lambda: tui.opened.chat.conversation.turns)
        assert tui.app.is_running

    gate = threading.Event()
    play(Tui(tmp_path, ("a", gate, answer())), scene)


@pytest.mark.parametrize("method", ["finish_turn", "update"])
def test_keys_do_not_wait_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gate, entered, real = threading.Event(), threading.Event(), getattr(SessionStore, method)

    def slow(*arguments: object) -> object:
        entered.set()
        gate.wait()
        return real(*arguments)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(SessionStore, method, slow)
        if method == "finish_turn":
            tui.prompt.insert("q")
            await pilot.press("enter")
        else:
            await pilot.press("ctrl+t", *"0.5", "escape")
        await tui.until(entered.is_set)
        try:
            tui.prompt.focus()
            await asyncio.wait_for(pilot.press(*"typed"), 30)
            assert tui.prompt.text == "typed"
        finally:
            gate.set()
        await tui.wait_until_idle(pilot)

    play(Tui(tmp_path), scene)


def test_a_search_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "needle")
        assert len(tui.manager.search("needle")) == 2
        assert [hit.turn_index for hit in tui.manager.search("needle", lambda: True)] == [None]

    play(Tui(tmp_path), scene)
