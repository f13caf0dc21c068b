"""Machine statistics, read on demand in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from localgen.backends.machine_stats import MachineStats
from localgen.backends.memory.system import available_memory_bytes, total_memory_bytes
from localgen.machine.gpus import read_gpu_metrics

# older statistics are refreshed on access
MAX_AGE_S = 1.0


class MachineWatch:
    """Caches machine statistics. probe: reads them; may be slow."""

    def __init__(self, probe: Callable[[], MachineStats] | None = None) -> None:
        self._probe = probe or measure_machine_use
        psutil.cpu_percent()  # measures since the previous call: start the first interval
        self._latest: MachineStats | None = None
        self._probed_s = -MAX_AGE_S
        self._is_probing = False

    @property
    def latest(self) -> MachineStats | None:
        """The latest statistics, None before the first probe ends. Never blocks.

        Starts a new probe if the previous one began more than MAX_AGE_S ago.
        """
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
    """Read CPU, RAM and GPU statistics. RAM respects the limit of the control group."""
    return MachineStats(
        cpu=psutil.cpu_percent() / 100,
        cores=psutil.cpu_count(),
        ram_bytes=total_memory_bytes(),
        ram_free_bytes=available_memory_bytes(),
        gpus=read_gpu_metrics(),
    )
