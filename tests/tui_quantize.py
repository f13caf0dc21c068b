"""A TUI whose quantizations play from a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import Static
from tui_chats import NoServerMonitor, Tui

from localgen.quant.request.events import (
    EstimateEvent,
    EvalEvent,
    EvalRow,
    FinishedEvent,
    LayersEstimateEvent,
    MethodEstimate,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
    RecommendationEvent,
    StoppedEvent,
    UnfinishedEvent,
)
from localgen.quant.request.losses import Interval
from localgen.quant.request.request import QuantizeRequest
from localgen.tui.chat.app import ChatApp
from localgen.tui.quantize.runner import QuantizeRunner
from localgen.tui.quantize.screen import QuantizeScreen

Play = Callable[["Quantizing", Pilot[None]], Awaitable[None]]
# an event is emitted, seconds pass on the clock, a threading.Event is waited for
Step = QuantizeEvent | float | BaseException | threading.Event
NEEDS = EstimateEvent(
    model="tiny",
    description="awq, 4 bits in groups of 128",
    output="tiny-awq-4bit",
    source_bytes=22_976_512,
    output_bytes=9_412_000,
    states_bytes=67_108_864,
    memory_bytes=534_000_000,
    free_bytes=3_210_000_000,
    disk_bytes=143_629_728,
    disk_free_bytes=24_100_000_000,
)
WAYS = (
    MethodEstimate("--gguf Q8_0", 12_400_000, 91_000_000, "CPU", "hardly any loss; no calibration"),
    MethodEstimate("--fp8", 12_100_000, 90_000_000, None, "hardly any loss; no calibration"),
    MethodEstimate(
        "--awq --gguf Q4_K_M", 9_600_000, 88_000_000, "CPU", "small loss; takes calibration"
    ),
    MethodEstimate("--awq", 9_400_000, 87_000_000, "GPU", "small loss; read by most engines"),
)
LOOK: tuple[Step, ...] = (RecommendationEvent(WAYS, "--awq"), NEEDS)
LOOK_WITHOUT_GPU: tuple[Step, ...] = (RecommendationEvent(WAYS, "--gguf Q8_0"), NEEDS)
UNFINISHED: tuple[Step, ...] = (*LOOK, UnfinishedEvent(2, 6))
ROWS = (
    EvalRow("tiny", "/m/tiny", 22_976_512, 32.0, 3.1234, None, 812.3),
    EvalRow(
        "tiny-awq-4bit",
        "tiny-awq-4bit",
        9_412_345,
        13.11,
        3.2012,
        0.0123,
        None,
        Interval(0.0112, 0.0136),
        Interval(0.0141, 0.0356),
    ),
)
BEGUN: tuple[Step, ...] = (
    NEEDS,
    ProgressEvent("checking weights", 22_976_512, 22_976_512, "bytes"),
    ProgressEvent("timing a layer", 0, 1, "steps"),
    ProgressEvent("timing a layer", 1, 1, "steps"),
    LayersEstimateEvent("quantizing", 6, 58.0),
    ProgressEvent("quantizing", 0, 6, "layers"),
    10.0,
    ProgressEvent("quantizing", 1, 6, "layers"),
    10.0,
    ProgressEvent("quantizing", 2, 6, "layers"),
)
NEVER = threading.Event()
RUNNING: tuple[Step, ...] = (*BEGUN, NEVER)
DONE: tuple[Step, ...] = (
    FinishedEvent("tiny-awq-4bit", 6, 0, 62.0, 58.0, 10.3, 512_000_000, 534_000_000),
    NoteEvent(
        "it runs on GPUs (no NVIDIA GPU was found here); --backend cuda --device cpu runs it"
    ),
    ProgressEvent("measuring tiny-awq-4bit", 6, 6, "steps"),
    EvalEvent(ROWS, 36),
)


class ScriptedWorker:
    """Plays a script. stop() omits the rest; during layers it ends with a `StoppedEvent`."""

    def __init__(self, script: Sequence[Step], clock: Clock) -> None:
        self.is_stopped, self.is_ended = threading.Event(), threading.Event()
        self._script, self._clock = script, clock
        self._at: ProgressEvent | None = None

    def events(self) -> Iterator[QuantizeEvent]:
        for step in self._script:
            match step:
                case threading.Event():
                    while not step.wait(0.005):
                        if self.is_ended.is_set():
                            return
                        if self.is_stopped.is_set():
                            if self._at is not None and self._at.unit == "layers":
                                yield StoppedEvent(self._at.done, self._at.total)
                            return
                case float():
                    self._clock.now_s += step
                case BaseException():
                    raise step
                case _:
                    self._at = step if isinstance(step, ProgressEvent) else self._at
                    yield step

    def stop(self) -> None:
        self.is_stopped.set()

    def kill(self) -> None:
        self.is_ended.set()

    def memory_bytes(self) -> int:
        return 498_000_000


class Clock:
    """A clock that only the script moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Quantizing(Tui):
    """looks, runs: scripts of previews and runs, one per process; the last preview is repeated."""

    def __init__(
        self,
        folder: Path,
        looks: Sequence[Sequence[Step]] = (LOOK,),
        runs: Sequence[Sequence[Step]] = (),
        *,
        is_elsewhere: bool = False,
    ) -> None:
        super().__init__(folder)
        self.looks, self.runs = list(looks), list(runs)
        self.asked_looks: list[QuantizeRequest] = []
        self.asked_runs: list[QuantizeRequest] = []
        self.works: list[ScriptedWorker] = []
        self.clock = Clock()
        self.runner = QuantizeRunner(folder, self._start, self.clock, is_remote=is_elsewhere)
        self.app = ChatApp(
            self.manager,
            NoServerMonitor,
            "this machine",
            first_retry_s=1000.0,
            quantize_runner=self.runner,
        )

    @property
    def screen(self) -> QuantizeScreen:
        screen = self.app.screen
        assert isinstance(screen, QuantizeScreen)
        return screen

    @property
    def is_estimated(self) -> bool:
        return self.screen._estimate_panel.estimate.is_complete

    @asynccontextmanager
    async def shown(self, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Pilot[None]]:
        """Run with the quantize screen open and its estimate complete."""
        async with self.running(size) as pilot:
            await self.open(pilot)
            yield pilot

    async def open(self, pilot: Pilot[None]) -> None:
        await pilot.press("f10")
        await self.until(lambda: isinstance(self.app.screen, QuantizeScreen))
        await pilot.pause()
        await self.until(lambda: self.is_estimated or not self.screen._estimate_panel.display)
        await pilot.pause()

    async def beat(self, pilot: Pilot[None]) -> None:
        """One refresh, as the program does many times a second."""
        self.app.tick()
        await pilot.pause()

    async def begin(self, pilot: Pilot[None]) -> None:
        """Press the key that starts a run and wait until it has started."""
        before = self.runner.current_run
        await pilot.press("ctrl+r")
        await self.until(lambda: self.runner.current_run is not before)
        await self.beat(pilot)

    async def ended(self, pilot: Pilot[None]) -> None:
        run = self.runner.current_run
        assert run is not None
        await self.until(run.ended.is_set)
        await self.beat(pilot)

    def close(self) -> None:
        for work in self.works:
            work.kill()
        super().close()

    def _start(self, asked: QuantizeRequest, looks: bool) -> ScriptedWorker:
        if looks:
            self.asked_looks.append(asked)
            script = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        else:
            self.asked_runs.append(asked)
            script = self.runs.pop(0)
        self.works.append(ScriptedWorker(script, self.clock))
        return self.works[-1]


async def wait_for_layers(tui: Quantizing, done: int) -> None:
    """Wait until the run has done this many layers."""

    def is_there() -> bool:
        run = tui.runner.current_run
        return run is not None and run.progress is not None and run.progress.done >= done

    await tui.until(is_there)
    await asyncio.sleep(0)


def play(tui: Quantizing, scene: Play, size: tuple[int, int] = (120, 40)) -> None:
    async def run() -> None:
        try:
            async with tui.shown(size) as pilot:
                await scene(tui, pilot)
        finally:
            tui.close()

    asyncio.run(run())


def notice_text(tui: Quantizing) -> str:
    return str(tui.screen.query_one("#message", Static).content)


async def wait_until_estimated(tui: Quantizing, pilot: Pilot[None], looks: int) -> None:
    """Wait until `looks` previews have started and the last one is complete."""
    await tui.until(lambda: len(tui.asked_looks) >= looks and tui.is_estimated)
    await pilot.pause()
