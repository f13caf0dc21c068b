"""The settings panel: which session a setting belongs to, and rejected values."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Collapsible, Input, Static, TextArea
from tui_chats import Tui, play, press

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.chat import parameters
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.settings import SettingField


async def two_sessions(tui: Tui, pilot: Pilot[None]) -> tuple[ActiveSession, ActiveSession]:
    """Two sessions, of which the second is on the screen."""
    await tui.ask(pilot, "one")
    first = tui.opened
    await tui.open_new(pilot)
    await tui.ask(pilot, "two")
    return first, tui.opened


def field(tui: Tui, name: str) -> Input:
    return tui.main.query_one(f"#set-{name} Input", Input)


@pytest.mark.parametrize("away", ["ctrl+down", "ctrl+n"])
def test_a_setting_is_of_the_session_it_was_typed_in(tmp_path: Path, away: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        _, second = await two_sessions(tui, pilot)
        await press(tui, pilot, "ctrl+t")
        await pilot.press(*"0.5", away)
        await tui.until(lambda: tui.opened is not second)
        await press(tui, pilot, "escape")
        assert second.chat.options.params == SamplingParams(temperature=0.5)
        assert tui.opened.chat.options.params == SamplingParams()
        assert tui.store.read(tui.opened.id).params == SamplingParams()

    play(Tui(tmp_path), scene)


def test_a_system_prompt_is_of_the_session_it_was_typed_in(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        _, second = await two_sessions(tui, pilot)
        await press(tui, pilot, "ctrl+t")
        tui.main.query_one("#system", TextArea).focus()
        await pilot.press(*"be brief", "ctrl+n")
        await tui.until(lambda: tui.opened is not second)
        assert tui.main.query_one("#system", TextArea).text == ""
        await press(tui, pilot, "escape")
        assert second.chat.conversation.system == "be brief"
        assert tui.opened.chat.conversation.system is None

    play(Tui(tmp_path), scene)


def test_what_is_typed_into_a_setting_is_kept_by_leaving(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        await pilot.press(*"0.5", "ctrl+q")
        await tui.until(lambda: not tui.app.is_running)
        assert tui.store.read(tui.opened.id).params.temperature == 0.5

    play(Tui(tmp_path), scene)


def test_the_fields_of_a_burst_are_in_order(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        for key in (*"0.5", "tab", *"20", "down", *"0.9"):
            tui.app.post_message(Key(key, key if len(key) == 1 else None))
        await tui.until(lambda: tui.app.focused is field(tui, "top_p"))
        await pilot.pause()
        assert field(tui, "top_p").value == "0.9"
        assert field(tui, "temperature").value == "0.5"
        assert field(tui, "top_k").value == "20"

    play(Tui(tmp_path), scene)


REFUSED = [
    ("temperature", "warm", "give a number"),
    ("temperature", "-5", "temperature is -5, it must be 0 to 100"),
    ("ctx", "999999", "ctx 999,999: tiny was trained for 2,048"),
]


def test_what_is_refused_stays_in_its_field(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        _, second = await two_sessions(tui, pilot)
        await press(tui, pilot, "ctrl+t")
        for setting, text, why in REFUSED:
            field(tui, setting).focus()
            await press(tui, pilot, *text, "tab")
            assert field(tui, setting).value == text
            await press(tui, pilot, "ctrl+down")
            assert tui.opened is not second
            assert field(tui, setting).value == ""
            await press(tui, pilot, "ctrl+up")
            assert field(tui, setting).value == text
            shown = tui.main.query_one("#settings .error", Static)
            assert why in str(shown.render())
            row = field(tui, setting).parent
            assert isinstance(row, SettingField)
            assert shown.region.y == row.region.bottom, "below the field"
            field(tui, setting).value = ""
            field(tui, setting).focus()
            await press(tui, pilot, "tab")
            assert not tui.main.query("#settings .error")
            assert second.chat.options.params == SamplingParams()
            assert second.chat.options.ctx is None

    play(Tui(tmp_path), scene)


def test_a_system_prompt_may_be_set_while_an_answer_is_written(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter", "ctrl+t")
        tui.main.query_one("#system", TextArea).focus()
        await pilot.press(*"be brief", "tab")
        await tui.until(lambda: tui.opened.chat.conversation.system == "be brief")
        gate.set()
        await tui.wait_until_idle(pilot)
        kept = tui.store.read(tui.opened.id).conversation
        assert (kept.system, len(kept.turns)) == ("be brief", 1)
        assert tui.main.query_one("#system", TextArea).text == "be brief"

    play(Tui(tmp_path, ("a", gate, answer())), scene)


def test_settings_are_in_groups_and_described(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        hint = tui.main.query_one("#hint", Static)
        assert str(hint.content) == "Temperature; 0: greedy. 0 to 100."
        groups = list(tui.main.query(Collapsible))
        assert [group.collapsed for group in groups] == [True, True]
        await press(tui, pilot, "escape")
        await tui.ask(pilot, "/set parameter mirostat 2")
        await press(tui, pilot, "ctrl+t")
        assert [group.collapsed for group in groups] == [False, True]
        field(tui, "mirostat").focus()
        await pilot.pause()
        assert str(hint.content).endswith("0: off. 0 to 2.")

    play(Tui(tmp_path), scene)


def test_each_parameter_is_in_one_group() -> None:
    groups = (parameters.USUAL_PARAMETERS, parameters.MORE_SAMPLERS, parameters.RARE_PARAMETERS)
    listed = [name for group in groups for name in group]
    assert sorted(listed) == sorted(parameters.PARAMETER_NAMES)
    assert all(parameters.describe(name) for name in listed)


@pytest.mark.parametrize(
    ("name", "text"), [("max_tokens", "0"), ("min_tokens", "-1"), ("seed", "-5")]
)
def test_numbers_that_are_too_low_are_rejected(tmp_path: Path, name: str, text: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, f"/set parameter {name} {text}")
        await tui.until(lambda: f"{name} is {text}, it must be at least" in tui.screen_text())
        assert tui.opened.chat.options.params == SamplingParams()

    play(Tui(tmp_path), scene)


def test_defaults_of_a_model_that_is_not_loaded_are_not_invented(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+t")
        assert field(tui, "top_p").placeholder == ""
        await press(tui, pilot, "escape")
        await tui.ask(pilot, "q")
        await press(tui, pilot, "ctrl+t")
        assert field(tui, "top_p").placeholder == "0.95, localgen"

    play(Tui(tmp_path), scene)


def test_an_error_is_gone_once_the_setting_is_changed(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert "Ctrl+R asks again" in tui.screen_text()
        await tui.ask(pilot, "/set parameter temperature 0.5")
        await tui.until(lambda: "Ctrl+R asks again" not in tui.screen_text())

    play(Tui(tmp_path, (InvalidRequest("temperature is bad"),)), scene)
