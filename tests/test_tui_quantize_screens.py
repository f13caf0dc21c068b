"""Snapshots of the quantize screen, at two sizes."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TextArea
from tui_quantize import BEGUN, DONE, LOOK, UNFINISHED, Quantizing, wait_for_layers

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.quant.originals import OriginalModel

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=str)
Scene = Callable[[Quantizing, Pilot[None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("localgen.tui.quantize.runner.require_packages", lambda: None)
    monkeypatch.setattr("localgen.tui.quantize.screen.DEBOUNCE_S", 0.0)
    here = [
        OriginalModel("tiny", 22_976_512, "built-in"),
        OriginalModel("meta-llama/Llama-3.2-1B-Instruct", 2_471_645_608, "cache"),
        OriginalModel("./my-finetune", 3_087_467_144, "here"),
    ]
    monkeypatch.setattr("localgen.tui.quantize.screen.scan_originals", lambda: here)


@pytest.fixture
def check(
    tmp_path: Path, snap_compare: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    made: list[Quantizing] = []
    monkeypatch.chdir(tmp_path)

    def run(scene: Scene, size: tuple[int, int], *arguments: object) -> None:
        tui = Quantizing(tmp_path, *arguments)  # type: ignore[arg-type]
        made.append(tui)

        async def before(pilot: Pilot[None]) -> None:
            await tui.until(lambda: tui.main.current_session)
            await tui.open(pilot)
            await scene(tui, pilot)
            for field in [*tui.app.screen.query(Input), *tui.app.screen.query(TextArea)]:
                field.cursor_blink = False
            await pilot.pause()

        assert snap_compare(tui.app, terminal_size=size, run_before=before)

    yield run
    for tui in made:
        tui.close()


async def nothing(tui: Quantizing, pilot: Pilot[None]) -> None:
    """The screen as it opens."""


async def at_layer_3(tui: Quantizing, pilot: Pilot[None]) -> None:
    await tui.begin(pilot)
    await wait_for_layers(tui, 2)
    await tui.beat(pilot)


async def to_its_end(tui: Quantizing, pilot: Pilot[None]) -> None:
    await tui.begin(pilot)
    await tui.ended(pilot)
    await tui.until(lambda: tui.is_estimated or not tui.screen._estimate_panel.display)
    await tui.beat(pilot)


@SIZES
def test_choice_and_estimate(check: Callable[..., None], size: tuple[int, int]) -> None:
    check(nothing, size)


@SIZES
def test_running(check: Callable[..., None], size: tuple[int, int]) -> None:
    check(at_layer_3, size, (LOOK,), ((*BEGUN, threading.Event()),))


@SIZES
def test_evaluation(check: Callable[..., None], size: tuple[int, int]) -> None:
    check(to_its_end, size, (LOOK,), ((*BEGUN, *DONE),))


@SIZES
def test_failed(check: Callable[..., None], size: tuple[int, int]) -> None:
    full = DiskFull(
        "cannot write to tiny-awq-4bit.partial: No space left on device; 1.2 MB are free: make "
        "room and run again with --resume"
    )
    check(to_its_end, size, (LOOK, UNFINISHED), ((*BEGUN, full),))


@SIZES
def test_quantized_model_rejected(check: Callable[..., None], size: tuple[int, int]) -> None:
    refused = InvalidRequest("tiny-awq is quantized already (awq): give the original model")
    check(nothing, size, ((refused,),))


@SIZES
def test_gguf(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.screen._form_panel.set_values(method="GGUF", gguf="IQ2_M")
        await pilot.pause()
        await tui.until(lambda: tui.is_estimated)
        await pilot.press("down", "down")

    check(scene, size)


@SIZES
def test_models(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+o")
        await tui.until(lambda: len(tui.app.screen_stack) == 3)
        await pilot.pause()

    check(scene, size)


@SIZES
def test_chats_during_a_run(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        await at_layer_3(tui, pilot)
        await pilot.press("escape")
        await pilot.pause()
        await tui.beat(pilot)

    check(scene, size, (LOOK,), ((*BEGUN, threading.Event()),))


@pytest.mark.parametrize("theme", ["light", "high-contrast", "monochrome", "terminal"])
def test_themes(check: Callable[..., None], theme: str) -> None:
    async def scene(tui: Quantizing, pilot: Pilot[None]) -> None:
        tui.app.theme = theme
        await pilot.pause()

    check(scene, (120, 40))


def test_smallest_size(check: Callable[..., None]) -> None:
    check(nothing, (60, 20))
