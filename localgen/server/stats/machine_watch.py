"""The machine while somebody looks: asked in a thread, so that no request waits for an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from localgen.backends.machine_stats import MachineUse
from localgen.backends.memory.system import available_bytes, total_bytes
from localgen.machine.gpus import gpu_uses

# older than this it is asked again
FRESH_S = 1.0


class MachineWatch:
    """look: finds out, and may take its time."""

    def __init__(self, look: Callable[[], MachineUse] | None = None) -> None:
        self._look = look or machine_use
        psutil.cpu_percent()  # it tells of the time since it was asked last
        self._found: MachineUse | None = None
        self._asked_s = -FRESH_S
        self._asking = False

    @property
    def use(self) -> MachineUse | None:
        """What was found last, a second ago or so if somebody keeps asking; None: nothing yet."""
        now_s = time.monotonic()
        if not self._asking and now_s - self._asked_s >= FRESH_S:
            self._asked_s, self._asking = now_s, True
            threading.Thread(target=self._ask, name="machine", daemon=True).start()
        return self._found

    def _ask(self) -> None:
        try:
            self._found = self._look()
        finally:
            self._asking = False


def machine_use() -> MachineUse:
    """This machine now, in this process' control group where that has less memory."""
    return MachineUse(
        cpu=psutil.cpu_percent() / 100,
        cores=psutil.cpu_count(),
        ram_bytes=total_bytes(),
        ram_free_bytes=available_bytes(),
        gpus=gpu_uses(),
    )
