"""Notice engines that send nothing: tell their clients, and kill them after the hang timeout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import psutil

from localgen.backends.model_info import ModelInfo
from localgen.server.models import engine_watch
from localgen.server.models.engine_client import EngineClient, ProcessUsage
from localgen.server.models.resident import ResidentModel

# an engine sends a heartbeat each second while it loads, then statistics with its steps, and every
# 5 s when idle
SILENT_AFTER_S = 10.0
WATCH_PERIOD_S = 1.0
# the server itself may have been stopped, and its engines with it: such a time counts as one period
_MAX_PERIODS = 2
# a step on the processor may take minutes, as 512 tokens of an 8B model do on two slow cores
_COMPUTING_WEIGHT = 0.1
_COMPUTING_CORES = 0.05
_log = logging.getLogger("localgen.server")


class EngineWatch:
    """Watches the engines of the models.

    residents: the models of the server. hang_timeout_s: of ServerSettings. read_usage: returns what
    a process has used so far.
    """

    def __init__(
        self,
        residents: Callable[[], Sequence[ResidentModel]],
        hang_timeout_s: float | None,
        *,
        read_usage: Callable[[int], ProcessUsage | None] | None = None,
    ) -> None:
        self._residents = residents
        self._hang_timeout_s = hang_timeout_s
        self._read_usage = read_usage or process_usage
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
            self._check_engine(resident, elapsed_s)

    def _check_engine(self, resident: ResidentModel, elapsed_s: float) -> None:
        engine, silence, info = resident.engine, resident.engine.silence, resident.info
        counted_s = min(elapsed_s, _MAX_PERIODS * engine_watch.WATCH_PERIOD_S)
        was_silent = is_silent(resident)
        silence.silent_s += counted_s
        if is_silent(resident) and not was_silent:
            name = resident.file.name
            _log.warning("%s: no message from its engine for %.0f s", name, silence.silent_s)
        if info is None:
            self._count_loading(engine, counted_s)
        else:
            computes = is_silent(resident) and self._computes(engine, info, elapsed_s)
            if engine.has_requests:
                silence.hung_s += counted_s * (_COMPUTING_WEIGHT if computes else 1.0)
        is_needed = info is None or engine.has_requests
        if not is_needed or not is_silent(resident):
            return
        limit_s = self._hang_timeout_s
        if limit_s is not None and silence.hung_s >= limit_s:
            self._kill(resident, limit_s)
        else:
            engine.announce_silence()

    def _count_loading(self, engine: EngineClient, counted_s: float) -> None:
        """Count the time since a loading engine last used the processor or the disk.

        Native code may keep the engine from sending heartbeats, but then it computes or reads.
        """
        silence = engine.silence
        before, silence.usage = silence.usage, self._read_usage(engine.pid)
        silence.hung_s = silence.hung_s + counted_s if silence.usage == before else 0.0

    def _computes(self, engine: EngineClient, info: ModelInfo, elapsed_s: float) -> bool:
        """Return True if an engine on the processor has computed since the last call."""
        before, now = engine.silence.usage, self._read_usage(engine.pid)
        engine.silence.usage = now
        if "CPU" not in info.processor or before is None or now is None:
            return False
        return now.cpu_s - before.cpu_s >= _COMPUTING_CORES * elapsed_s

    def _kill(self, resident: ResidentModel, limit_s: float) -> None:
        silent_s = resident.engine.silence.silent_s
        loading = " while loading" if resident.info is None else ""
        reason = (
            f"the engine of {resident.file.name} sent nothing for {silent_s:.0f} s{loading} and "
            f"was killed (hang timeout {limit_s:g} s); the next request loads the model again"
        )
        task = asyncio.create_task(resident.engine.kill(reason))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)


def is_silent(resident: ResidentModel) -> bool:
    """True if the engine of a model has sent nothing for SILENT_AFTER_S."""
    return resident.engine.silence.silent_s >= engine_watch.SILENT_AFTER_S


def silence_s(resident: ResidentModel) -> float | None:
    """Seconds for which the engine of a model has sent nothing, or None if it is not silent."""
    return resident.engine.silence.silent_s if is_silent(resident) else None


def process_usage(pid: int) -> ProcessUsage | None:
    """Return the CPU time and I/O counters of a process; None if it has ended, or if unknown."""
    try:
        process = psutil.Process(pid)
        used = process.cpu_times()
    except (OSError, psutil.Error):  # without free file descriptors, the watch must go on
        return None
    return ProcessUsage(used.user + used.system, _io_counters(process))


def _io_counters(process: psutil.Process) -> tuple[int, ...]:
    """Counters of reads and writes; empty where the system does not tell, as on macOS."""
    try:
        return tuple(process.io_counters())
    except (AttributeError, OSError, psutil.Error):
        return ()
