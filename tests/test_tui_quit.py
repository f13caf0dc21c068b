"""Quitting the program, a load or a dialog: nothing is lost or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList
from tui_chats import Tui, play, press

from localgen.backends.errors import DiskFull
from localgen.chat.session_store import SessionStore
from localgen.tui.base_app import TerminalTooSmall
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.widgets.dialog import ConfirmDialog


def test_quit_asks_about_unsaved_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DiskFull("the disk is full")

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        with monkeypatch.context() as full:
            for name in ("begin_turn", "update", "finish_turn", "update_turn"):
                full.setattr(SessionStore, name, refuse)
            await tui.ask(pilot, "precious")
            unkept = tui.opened
            await press(tui, pilot, "ctrl+n")
            await tui.until(lambda: tui.opened is not unkept)
            tui.app.tick()
            await pilot.pause()
            row = next(row for row in tui.main._session_rows() if row.id == unkept.id)
            assert row.activity == "not saved"
            await pilot.press("ctrl+q")
            await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
            await pilot.pause()
            shown = " ".join(tui.screen_text().split())
            assert "precious is not saved" in shown
            assert "would be lost: the disk" in shown
            await pilot.press("n")
            await pilot.pause()
        await tui.until(lambda: not unkept.save_error)  # there is room again
        await pilot.press("ctrl+q")
        await tui.until(lambda: not tui.app.is_running)
        assert [turn.answer for turn in tui.store.read(unkept.id).conversation.turns] == [
            "re: precious"
        ]

    play(Tui(tmp_path), scene)


async def begin_to_load(tui: Tui, pilot: Pilot[None]) -> None:
    """Start loading a model that is chosen in the picker."""
    await pilot.press("ctrl+o")
    await tui.until(lambda: isinstance(tui.app.screen, ModelPicker))
    picker = tui.app.screen
    assert isinstance(picker, ModelPicker)
    await tui.until(lambda: picker.query_one(OptionList).option_count)
    await pilot.press(*"other", "enter")
    await tui.until(lambda: tui.clients[0].record.loaded)


def test_quit_while_a_model_loads(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.gate_loads()
        await begin_to_load(tui, pilot)
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.pause()
        assert "/model other is still running" in tui.screen_text()
        await pilot.press("y")
        await tui.until(lambda: not tui.app.is_running)
        assert tui.clients[0].was_cut.is_set()

    # asyncio.run() joins its threads: a load that does not end would hang here
    play(Tui(tmp_path), scene)


def test_ctrl_c_cancels_a_load_in_the_background(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.gate_loads()
        await begin_to_load(tui, pilot)
        await pilot.press("ctrl+c")
        await tui.until(lambda: "stopped" in tui.screen_text())
        assert tui.opened.chat.requested_model is None
        assert tui.load_gate is not None
        tui.load_gate.set()
        await tui.ask(pilot, "q")  # by a client that was not cut
        assert tui.opened.chat.conversation.turns[-1].answer == "re: q"

    play(Tui(tmp_path), scene)


def test_ctrl_c_cancels_a_load_by_command(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.gate_loads()
        await tui.type(pilot, "/show info")
        await pilot.press("enter")
        await tui.until(lambda: "/show info · loading 50%" in tui.screen_text())
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.press("n", "ctrl+c")
        await tui.until(lambda: not tui.opened.running_command)
        await tui.until(lambda: "stopped" in tui.screen_text())
        assert tui.app.is_running

    play(Tui(tmp_path), scene)


def test_a_load_ends_behind_the_too_small_notice(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        gate = tui.gate_loads()
        await begin_to_load(tui, pilot)
        await pilot.resize_terminal(50, 15)
        await tui.until(lambda: isinstance(tui.app.screen, TerminalTooSmall))
        gate.set()
        await tui.until(lambda: tui.opened.chat.requested_model == "other")
        await pilot.pause()
        assert isinstance(tui.app.screen, TerminalTooSmall)
        await pilot.resize_terminal(120, 40)
        await tui.until(lambda: tui.app.screen is tui.main)

    play(Tui(tmp_path), scene)


def test_too_small_notice_behind_a_dialog_closes(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(50, 15)
        await tui.until(lambda: isinstance(tui.app.screen, TerminalTooSmall))
        small = tui.app.screen
        await pilot.press("ctrl+p")
        await tui.until(lambda: tui.app.screen is not small)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        await pilot.press("escape")
        await tui.until(lambda: tui.app.screen is tui.main)

    play(Tui(tmp_path), scene)
