"""Notice engines that send nothing: tell their clients, and kill them after the hang timeout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import psutil

from localgen.backends.model_info import ModelInfo
from localgen.server.models import engine_watch
from localgen.server.models.resident import ResidentModel

# an engine sends statistics with its steps, and every 5 s when idle
SILENT_AFTER_S = 10.0
WATCH_PERIOD_S = 1.0
# the server itself may have been stopped, and its engines with it: such a time counts as one period
_MAX_PERIODS = 2
# a step on the processor may take minutes, as 512 tokens of an 8B model do on two slow cores
_COMPUTING_WEIGHT = 0.1
_COMPUTING_CORES = 0.05
_log = logging.getLogger("localgen.server")


class EngineWatch:
    """Watches the loaded engines; loading has its own progress.

    residents: the models of the server. hang_timeout_s: of ServerSettings. cpu_seconds: returns the
    CPU time of a process.
    """

    def __init__(
        self,
        residents: Callable[[], Sequence[ResidentModel]],
        hang_timeout_s: float | None,
        *,
        cpu_seconds: Callable[[int], float | None] | None = None,
    ) -> None:
        self._residents = residents
        self._hang_timeout_s = hang_timeout_s
        self._cpu_seconds = cpu_seconds or process_cpu_seconds
        self._checked_s: float | None = None
        self._kills: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.check(time.monotonic())
            await asyncio.sleep(engine_watch.WATCH_PERIOD_S)

    def check(self, now_s: float) -> None:
        """Count the time since the last call. now_s: monotonic."""
        elapsed_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        for resident in self._residents():
            if resident.info is not None:
                self._check_engine(resident, resident.info, elapsed_s)

    def _check_engine(self, resident: ResidentModel, info: ModelInfo, elapsed_s: float) -> None:
        engine, silence = resident.engine, resident.engine.silence
        counted_s = min(elapsed_s, _MAX_PERIODS * engine_watch.WATCH_PERIOD_S)
        was_silent = is_silent(resident)
        silence.silent_s += counted_s
        if not is_silent(resident):
            silence.hung_s += counted_s if engine.has_requests else 0.0
            return
        if not was_silent:
            _log.warning("%s: no message from its engine for %.0f s", info.name, silence.silent_s)
        cpu_s, before_s = self._cpu_seconds(engine.pid), silence.cpu_s
        silence.cpu_s = cpu_s
        if not engine.has_requests:
            return
        computes = (
            "CPU" in info.processor
            and cpu_s is not None
            and before_s is not None
            and cpu_s - before_s >= _COMPUTING_CORES * elapsed_s
        )
        silence.hung_s += counted_s * (_COMPUTING_WEIGHT if computes else 1.0)
        limit_s = self._hang_timeout_s
        if limit_s is not None and silence.hung_s >= limit_s:
            self._kill(resident, limit_s)
        else:
            engine.announce_silence()

    def _kill(self, resident: ResidentModel, limit_s: float) -> None:
        silent_s = resident.engine.silence.silent_s
        reason = (
            f"the engine of {resident.file.name} sent nothing for {silent_s:.0f} s and was killed "
            f"(hang timeout {limit_s:g} s); the next request loads the model again"
        )
        task = asyncio.create_task(resident.engine.kill(reason))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)


def is_silent(resident: ResidentModel) -> bool:
    """True if the engine of a loaded model has sent nothing for SILENT_AFTER_S."""
    return resident.engine.silence.silent_s >= engine_watch.SILENT_AFTER_S


def process_cpu_seconds(pid: int) -> float | None:
    """CPU time of a process so far; None if it has ended."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return used.user + used.system
