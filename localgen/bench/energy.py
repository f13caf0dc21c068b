"""Energy that the processor and the GPUs have used, where the system tells it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localgen.machine.gpus import gpu_energy_joules

_POWERCAP = Path("/sys/class/powercap")
# a processor package, whose cores and memory controller are its subzones
_PACKAGE = re.compile(r"intel-rapl:\d+")
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Counter:
    """Joules since some time. wraps_at: after these it begins at 0 again, or 0 for never."""

    joules: float
    wraps_at: float = 0.0


Counters = Mapping[str, Counter]
ReadCounters = Callable[[], Counters]


def read_counters(powercap: Path = _POWERCAP) -> Counters:
    """Counters of the processor packages (RAPL) and of the GPUs (NVML), by name.

    Linux lets root alone read RAPL, unless told otherwise. Empty where nothing can be read.
    """
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        if _PACKAGE.fullmatch(zone.name) is None:
            continue
        try:
            name = (zone / "name").read_text(encoding="ascii").strip()
            counted = float((zone / "energy_uj").read_text(encoding="ascii"))
            wraps_at = float((zone / "max_energy_range_uj").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        found[name] = Counter(counted * _MICRO, wraps_at * _MICRO)
    gpus = gpu_energy_joules()
    return found | ({} if gpus is None else {"GPU": Counter(gpus)})


def joules_between(before: Counters, after: Counters) -> float | None:
    """Joules used between two readings; None if there are no counters."""
    both = [name for name in before if name in after]
    if not both:
        return None
    used = 0.0
    for name in both:
        passed = after[name].joules - before[name].joules
        used += passed if passed >= 0 else passed + before[name].wraps_at
    return used
