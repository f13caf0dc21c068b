"""The machine while somebody looks: asked in a thread, so that no request waits for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from localgen.backends.machine_stats import MachineStats
from localgen.backends.memory.system import available_memory_bytes, total_memory_bytes
from localgen.machine.gpus import read_gpu_metrics

# older than this it is asked again
MAX_AGE_S = 1.0


class MachineWatch:
    """probe: finds out, and may take its time."""

    def __init__(self, probe: Callable[[], MachineStats] | None = None) -> None:
        self._probe = probe or measure_machine_use
        psutil.cpu_percent()  # it tells of the time since it was asked last
        self._latest: MachineStats | None = None
        self._probed_s = -MAX_AGE_S
        self._is_probing = False

    @property
    def latest(self) -> MachineStats | None:
        """What was found last, a second ago or so if somebody keeps asking; None: nothing yet."""
        now_s = time.monotonic()
        if not self._is_probing and now_s - self._probed_s >= MAX_AGE_S:
            self._probed_s, self._is_probing = now_s, True
            threading.Thread(target=self._run_probe, name="machine", daemon=True).start()
        return self._latest

    def _run_probe(self) -> None:
        try:
            self._latest = self._probe()
        finally:
            self._is_probing = False


def measure_machine_use() -> MachineStats:
    """This machine now, in this process' control group where that has less memory."""
    return MachineStats(
        cpu=psutil.cpu_percent() / 100,
        cores=psutil.cpu_count(),
        ram_bytes=total_memory_bytes(),
        ram_free_bytes=available_memory_bytes(),
        gpus=read_gpu_metrics(),
    )
