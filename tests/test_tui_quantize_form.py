"""The quantize form: keys, rejected choices, restored choices."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Button, Input
from tui_quantize import (
    BEGUN,
    LOOK,
    LOOK_WITHOUT_GPU,
    NEVER,
    UNFINISHED,
    Quantizing,
    notice_text,
    play,
    wait_until_estimated,
)

from localgen.backends.errors import LoadFailed, ModelNotFound, OutOfMemory
from localgen.quant.advice import _PRESETS
from localgen.quant.request.form import QuantizeForm, method_option, with_option
from localgen.quant.request.target import GgufTarget
from localgen.tui.quantize.choices import NamePicker, RadioChoices

pytestmark = pytest.mark.usefixtures("two_originals")


def test_the_keys_of_the_form(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        assert tui.app.focused is tui.screen.query_one("#control-model")
        await pilot.press("down")
        assert tui.app.focused is tui.screen.query_one("#control-method")
        await pilot.press("right")
        await wait_until_estimated(tui, pilot, 2)
        assert tui.screen._form_panel.form.method == "gptq"
        await pilot.press("left", "left", "left", "left")
        assert tui.screen._form_panel.form.method == "rtn"
        assert not tui.screen.query_one("#field-text .control").display
        await pilot.press("down", "right")
        assert tui.screen._form_panel.form.bits == 3
        await pilot.press("down", "space", "space", "space", "space")
        assert tui.screen._form_panel.form.group_size == -1
        await pilot.press("down", "right")
        assert not tui.screen._form_panel.form.is_measured
        await pilot.press("down", *"mine", "enter")
        await wait_until_estimated(tui, pilot, 6)
        asked = tui.asked_looks[-1]
        assert asked.recipe is not None
        assert (asked.recipe.method, asked.recipe.bits, asked.recipe.group_size) == ("rtn", 3, None)
        assert (asked.output, asked.eval_set) == (Path("mine"), None)

    play(Quantizing(tmp_path), scene)


def test_the_model_from_a_list_and_typed(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press("down", "enter")
        await wait_until_estimated(tui, pilot, 2)
        assert tui.asked_looks[-1].model == "./other"
        assert tui.screen.query_one("#control-out", Input).placeholder == "other-awq-4bit"
        await pilot.press("ctrl+o")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press(*"/m/qwen", "enter")
        await wait_until_estimated(tui, pilot, 3)
        assert tui.asked_looks[-1].model == "/m/qwen"
        await pilot.press("ctrl+o")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.press("escape")
        await pilot.pause()
        assert tui.screen._form_panel.form.model == "/m/qwen"

    play(Quantizing(tmp_path), scene)


def test_two_bits_learn_their_rounding(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="gptq")
        await pilot.press("down", "down", "right", "right")
        await wait_until_estimated(tui, pilot, 3)
        asked = tui.asked_looks[-1].recipe
        assert asked is not None
        assert (asked.method, asked.bits) == ("gptq", 2)
        assert asked.rounding_steps > 0
        await pilot.press("down", "down", "right")
        await wait_until_estimated(tui, pilot, 4)
        plain = tui.asked_looks[-1].recipe
        assert plain == replace(asked, rounding_steps=0)
        tui.screen._form_panel.set_values(bits=4)
        await tui.until(lambda: "gptq with 4 bits: plain" in tui.screen_text())

    play(Quantizing(tmp_path), scene)


def test_a_filter_without_match_says_what_enter_does(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="GGUF")
        await pilot.press("down", "down", "enter")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press(*"q9", "down", "up")
        await tui.until(lambda: "no match; Enter takes what is typed" in tui.screen_text())
        await pilot.press("enter")
        await tui.until(lambda: "unknown file type q9: use auto or one of" in notice_text(tui))
        assert tui.screen._form_panel.form.gguf == "Q4_K_M"

    play(Quantizing(tmp_path), scene)


def test_gguf_has_a_type_and_calibrates_where_it_must(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="GGUF")
        await pilot.pause()
        assert not tui.screen.query_one("#field-bits .control").display
        await pilot.press("down", "down", "enter")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press(*"iq2_m", "enter")
        await wait_until_estimated(tui, pilot, 3)
        asked = tui.asked_looks[-1]
        assert (asked.gguf, asked.mode) == ("IQ2_M", "observe")
        assert asked.recipe is not None
        refused = tui.screen.query_one("#control-gguf_calibration", RadioChoices)
        assert "IQ2_M requires an importance matrix" in refused.disabled_reason_text
        assert tui.screen._form_panel.form.effective_calibration == "importance"
        await pilot.press("down", "right")
        assert tui.screen._form_panel.form.to_request().mode == "fold"
        await pilot.press("left", "left", "left")
        assert tui.screen._form_panel.form.gguf_calibration == "importance"

    play(Quantizing(tmp_path), scene)


def test_gguf_types_by_measured_loss_have_a_target(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="GGUF")
        await pilot.pause()
        await pilot.press("down", "down", "enter")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press(*"auto 4 bit", "enter")
        await tui.until(lambda: "give auto, auto 3.4G" in notice_text(tui))
        assert tui.screen._form_panel.form.gguf == "Q4_K_M"
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, NamePicker))
        await pilot.pause()
        await pilot.press(*"auto 4 bits", "enter")
        await tui.until(lambda: tui.screen._form_panel.form.gguf == "auto 4 bits")
        await wait_until_estimated(tui, pilot, 3)
        asked = tui.asked_looks[-1]
        assert asked.target == GgufTarget(bits_per_weight=4)
        refused = tui.screen.query_one("#control-gguf_calibration", RadioChoices)
        assert "auto 4 bits requires an importance matrix" in refused.disabled_reason_text
        await pilot.press("down", "right")
        assert tui.screen._form_panel.form.to_request().mode == "gguf"

    play(Quantizing(tmp_path), scene)


def test_the_method_that_suits_best_is_selected_until_one_is_chosen(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await wait_until_estimated(tui, pilot, 2)
        form = tui.screen._form_panel.form
        assert (form.method, form.gguf, form.gguf_calibration) == ("GGUF", "Q8_0", "nothing")
        tui.screen._form_panel.set_values(model="other")  # is no choice of a method
        await wait_until_estimated(tui, pilot, 3)
        tui.screen._form_panel.set_values(method="gptq")
        await wait_until_estimated(tui, pilot, 4)
        tui.screen._form_panel.set_values(model="third")
        await wait_until_estimated(tui, pilot, 5)
        assert tui.screen._form_panel.form.method == "gptq"

    play(Quantizing(tmp_path, (LOOK_WITHOUT_GPU,) * 5), scene)


@pytest.mark.parametrize("option", [preset.option for preset in _PRESETS])
def test_options_are_what_forms_mean(option: str) -> None:
    assert method_option(with_option(QuantizeForm(gguf_calibration="importance"), option)) == option


def test_new_choice_cancels_the_old_estimate(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(bits=3)
        await tui.until(lambda: len(tui.works) == 2)
        assert "estimating" in tui.screen_text()
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert "still estimating" in notice_text(tui)
        tui.screen._form_panel.set_values(bits=8)
        await wait_until_estimated(tui, pilot, 3)
        assert tui.works[1].is_ended.is_set()
        assert "9.41 of 23.0 MB" in tui.screen_text()

    play(Quantizing(tmp_path, (LOOK, (NEVER,), LOOK)), scene)


@pytest.mark.parametrize(
    "error", [ModelNotFound("model 'x' not found"), LoadFailed("damaged"), ValueError("odd")]
)
def test_impossible_choices_give_a_reason(tmp_path: Path, error: Exception) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        assert str(error) in tui.screen_text()
        assert tui.screen.query_one("#run", Button).disabled
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert str(error) in notice_text(tui)
        tui.screen._form_panel.set_values(bits=3)
        await wait_until_estimated(tui, pilot, 2)
        assert not tui.screen.query_one("#run", Button).disabled
        assert notice_text(tui) == ""

    play(Quantizing(tmp_path, ((error,), LOOK)), scene)


def test_recipe_without_a_format_is_rejected(tmp_path: Path) -> None:
    """It is rejected before any process starts."""

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(group_size=100)
        await tui.until(lambda: "multiple of 8" in tui.screen_text())
        assert len(tui.asked_looks) == 1

    play(Quantizing(tmp_path), scene)


def test_unfinished_runs_are_offered(tmp_path: Path) -> None:
    """The form starts with the unfinished run, wherever the program was started."""
    out = tmp_path / "elsewhere" / "mine"
    (out.parent / "mine.partial").mkdir(parents=True)
    (out.parent / "mine.partial" / "plan.json").write_text("{}")
    kept = QuantizeForm(model="./other", method="gptq", bits=3, out=str(out))
    (tmp_path / "quantize.json").write_text(json.dumps(asdict(kept)))

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        assert tui.screen._form_panel.form == kept
        assert "unfinished run, 2 of 6 layers done" in tui.screen_text()

    play(Quantizing(tmp_path, (UNFINISHED,)), scene)


def test_last_unfinished_run_is_offered_again(tmp_path: Path) -> None:
    """The default output is not stored, since it depends on the method."""
    (tmp_path / "tiny-awq-4bit.partial").mkdir()
    (tmp_path / "tiny-awq-4bit.partial" / "plan.json").write_text("{}")
    first = Quantizing(tmp_path, runs=((*BEGUN, OutOfMemory("it was killed")),))

    async def fails(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(is_measured=False)
        await wait_until_estimated(tui, pilot, 2)
        await tui.begin(pilot)
        await tui.ended(pilot)

    play(first, fails)

    async def again(tui: Quantizing, pilot: Pilot[None]) -> None:
        assert tui.screen._form_panel.form == QuantizeForm(is_measured=False)

    play(Quantizing(tmp_path), again)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"method": "odd"}', '{"bits": "x"}'])
def test_damaged_stored_form_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "quantize.json").write_text(text)

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        assert tui.screen._form_panel.form == QuantizeForm()

    play(Quantizing(tmp_path), scene)
