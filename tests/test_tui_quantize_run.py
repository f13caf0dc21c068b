"""A quantization run on the screen: its keys, its end, and its faults."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static
from tui_quantize import (
    BEGUN,
    DONE,
    LOOK,
    NEEDS,
    NEVER,
    RUNNING,
    UNFINISHED,
    Quantizing,
    notice_text,
    play,
    wait_for_layers,
    wait_until_estimated,
)

from localgen.backends.errors import OutOfMemory
from localgen.quant.request.events import EvalEvent, EvalRow, FinishedEvent, ProgressEvent
from localgen.quant.request.form import QuantizeForm
from localgen.quant.request.step_eta import StepEta
from localgen.tui.chat.main_screen import QuantizeStatusLine
from localgen.tui.quantize.screen import QuantizeScreen
from localgen.tui.widgets.dialog import ConfirmDialog

pytestmark = pytest.mark.usefixtures("two_originals")


def test_mouse_starts_and_stops_a_run(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        # ● rtn  ○ awq  ○ gptq
        await pilot.click("#control-method", offset=(15, 0))
        await pilot.pause()
        assert tui.screen._form_panel.form.method == "gptq"
        await wait_until_estimated(tui, pilot, 2)
        await pilot.click("#run")
        await tui.until(lambda: tui.runner.is_running)
        await wait_for_layers(tui, 2)
        await tui.beat(pilot)
        await pilot.click("#stop")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.pause()
        await pilot.click("#yes")
        await tui.ended(pilot)

    play(Quantizing(tmp_path, runs=(RUNNING,)), scene)


def test_run_ends_with_an_evaluation(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await wait_for_layers(tui, 2)
        await tui.beat(pilot)
        shown = tui.screen_text()
        assert "layer 3 of 6" in shown
        assert "40s left" in shown
        assert "498 MB, about 534 MB at most" in shown
        assert tui.screen._form_panel.disabled
        more.set()
        await tui.ended(pilot)
        shown = tui.screen_text()
        assert "3.201" in shown
        assert "+2.49 %" in shown
        assert not tui.screen._form_panel.disabled
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert len(tui.asked_runs) == 1
        tui.screen._form_panel.set_values(bits=3)
        await wait_until_estimated(tui, pilot, 2)
        assert "3.201" not in tui.screen_text()

    more = threading.Event()
    play(Quantizing(tmp_path, runs=((*BEGUN, more, *DONE),)), scene)


def test_stop_asks_and_run_resumes(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await wait_for_layers(tui, 2)
        await pilot.press("ctrl+c")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.pause()
        assert "can be resumed" in " ".join(tui.screen_text().replace("│", "").split())
        await pilot.press("n")
        await pilot.pause()
        assert tui.runner.is_running
        await pilot.press("ctrl+c")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.press("y")
        await tui.ended(pilot)
        await wait_until_estimated(tui, pilot, 2)
        await tui.beat(pilot)
        shown = tui.screen_text()
        assert "2 of 6 layers are done" in shown
        assert "Resume (Ctrl+R)" in shown
        await tui.begin(pilot)
        await tui.ended(pilot)
        assert [asked.resume for asked in tui.asked_runs] == [False, True]
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert "nothing is being quantized" in notice_text(tui)

    play(Quantizing(tmp_path, (LOOK, UNFINISHED), (RUNNING, (*BEGUN, *DONE))), scene)


def test_stop_warns_where_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="GGUF")
        await wait_until_estimated(tui, pilot, 2)
        await tui.begin(pilot)
        await pilot.press("ctrl+c")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.pause()
        assert "cannot be resumed" in " ".join(tui.screen_text().replace("│", "").split())
        await pilot.press("y")
        await tui.ended(pilot)
        await tui.until(lambda: "Nothing was kept" in tui.screen_text())

    play(
        Quantizing(tmp_path, runs=((NEEDS, ProgressEvent("rounding", 3, 9, "tensors"), NEVER),)),
        scene,
    )


def test_run_continues_behind_the_chats(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await wait_for_layers(tui, 2)
        await pilot.press("escape")
        await pilot.pause()
        await tui.beat(pilot)
        assert tui.main.is_shown
        line = tui.main.query_one(QuantizeStatusLine)
        assert line.display
        assert str(line.content) == "quantizing tiny-awq-4bit: layer 3 of 6, 40s left · F10"
        await pilot.click(QuantizeStatusLine)
        await tui.until(lambda: isinstance(tui.app.screen, QuantizeScreen))
        await tui.beat(pilot)
        assert "layer 3 of 6" in tui.screen_text()
        await pilot.press("escape")
        await pilot.pause()
        more.set()
        await tui.ended(pilot)
        assert not line.display
        assert "tiny-awq-4bit is ready · F10 shows it" in tui.screen_text()
        await tui.open(pilot)
        assert "3.201" in tui.screen_text()

    more = threading.Event()
    play(Quantizing(tmp_path, runs=((*BEGUN, more, *DONE),)), scene)


def test_a_chat_with_the_result(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert isinstance(tui.app.screen, QuantizeScreen)
        await tui.begin(pilot)
        await tui.ended(pilot)
        await pilot.press("ctrl+t")
        # the scripted server has no such model
        refusal = f"Model '{tmp_path}/tiny-awq-4bit' not found"
        line = tui.app.main_screen.query_one("#message", Static)
        await tui.until(lambda: refusal in str(line.content))
        assert tui.app.main_screen.is_shown

    play(Quantizing(tmp_path, runs=((*BEGUN, *DONE),)), scene)


@pytest.mark.parametrize("answer", ["n", "y"])
def test_quit_asks_during_a_run(tmp_path: Path, answer: str) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await wait_for_layers(tui, 2)
        await pilot.press("ctrl+q")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))
        await pilot.pause()
        assert "tiny-awq-4bit is being quantized (layer 3 of 6)" in tui.screen_text()
        await pilot.press(answer)
        work = tui.works[-1]
        if answer == "y":
            await tui.until(work.is_stopped.is_set)
        else:
            await pilot.pause()
            assert tui.runner.is_running

    play(Quantizing(tmp_path, runs=(RUNNING,)), scene)


@pytest.mark.parametrize("error", [OutOfMemory("it was killed"), RuntimeError("odd")])
def test_a_run_that_fails_can_be_run_again(tmp_path: Path, error: Exception) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(bits=3, out="mine")
        await wait_until_estimated(tui, pilot, 2)
        await tui.begin(pilot)
        await tui.ended(pilot)
        await wait_until_estimated(tui, pilot, 3)
        assert str(error) in tui.screen_text()
        assert tui.screen._form_panel.form == QuantizeForm(bits=3, out="mine")
        await tui.begin(pilot)
        await tui.ended(pilot)
        assert "Verdict" in tui.screen_text()

    play(Quantizing(tmp_path, runs=((*BEGUN, error), (*BEGUN, *DONE))), scene)


def test_the_estimate_of_layers_ends_with_their_step(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await tui.until(lambda: "quantizing, layer 3" in tui.screen_text())
        assert "58s for 6 layers" in tui.screen_text()
        go_on.set()
        await tui.until(lambda: "measuring sensitivity" in tui.screen_text())
        assert "58s for 6 layers" not in tui.screen_text()

    go_on = threading.Event()
    next_step = ProgressEvent("measuring sensitivity", 0, 37, "steps")
    play(Quantizing(tmp_path, runs=((*BEGUN, go_on, next_step, NEVER),)), scene)


def test_a_result_that_could_not_be_measured(tmp_path: Path) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await tui.ended(pilot)
        shown = tui.screen_text()
        assert "not measured: the memory is full" in shown
        assert "Chat with it" in shown

    script = (NEEDS, FinishedEvent("tiny-awq-4bit"), OutOfMemory("the memory is full"))
    play(Quantizing(tmp_path, runs=(script,)), scene)


def test_control_sequences_in_names_are_inert(tmp_path: Path) -> None:
    """Folder names are neither markup nor terminal commands."""

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await tui.ended(pilot)
        shown = tui.screen_text()
        assert "\x1b" not in shown
        assert "[red]x" in shown

    rows = (EvalRow("tiny", "t", 2, 16.0), EvalRow("[red]x\x1b]2;y\x07", "r", 1, 4.0))
    made = FinishedEvent("[red]x\x1b]2;y\x07")
    play(Quantizing(tmp_path, runs=((NEEDS, made, EvalEvent(rows)),)), scene)


def test_a_step_may_begin_between_two_reads_of_the_time_left() -> None:
    eta = StepEta(lambda: now_s)
    now_s = 0.0
    eta.update("quantizing", 0, 8)
    now_s = 10.0
    eta.update("quantizing", 1, 8)
    assert eta.remaining_s() == 70.0

    def begin_step() -> float:
        eta._clock = lambda: now_s
        eta.update("evaluating", 0, 8)
        return now_s

    eta._clock = begin_step
    assert eta.remaining_s() is not None
    assert eta.remaining_s() is None


def test_many_fast_items_outweigh_a_slow_first_one() -> None:
    eta = StepEta(lambda: now_s)
    now_s = 0.0
    eta.update("rounding", 0, 100)
    now_s = 30.0
    eta.update("rounding", 1, 100)
    for done in range(2, 51):
        now_s += 0.1
        eta.update("rounding", done, 100)
    left_s = eta.remaining_s()
    assert left_s is not None
    assert 5 < left_s < 40


def test_the_bar_moves_within_a_layer(tmp_path: Path) -> None:
    """The time left does not: learning is only a part of a layer's time."""

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await tui.until(lambda: "35%" in tui.screen_text())
        assert "quantizing, layer 2 of 4" in tui.screen_text()
        assert "30s left" in tui.screen_text()

    begun, second = (ProgressEvent("quantizing", done, 4, "layers") for done in (0, 1))
    steps = (begun, 10.0, second, replace(second, current=0.2), replace(second, current=0.4), NEVER)
    play(Quantizing(tmp_path, runs=(steps,)), scene)


def test_the_time_left_is_smoothed(tmp_path: Path) -> None:
    """One slow layer does not change the estimate for all."""

    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await tui.begin(pilot)
        await wait_for_layers(tui, 4)
        run = tui.runner.current_run
        assert run is not None
        assert run.remaining_s is not None
        assert 4 * 10 < run.remaining_s < 4 * 30
        tui.clock.now_s += 10.0
        before = run.remaining_s
        tui.clock.now_s += 1000.0
        assert 0 < run.remaining_s <= before

    layers = [ProgressEvent("quantizing", done, 8, "layers") for done in range(5)]
    steps = (layers[0], 10.0, layers[1], 10.0, layers[2], 10.0, layers[3], 30.0, layers[4], NEVER)
    play(Quantizing(tmp_path, runs=((NEEDS, *steps),)), scene)
