"""What else the machine does, and how fast its processor may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from localgen.backends.memory.system import num_physical_cores
from localgen.machine.busy_processes import busy_programs
from localgen.machine.system_info import cpu_name

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
# of a core, by all other programs together: what is measured then is too slow
_BUSY_CORES = 0.25


@dataclass(frozen=True, slots=True)
class MachineState:
    """The processor, its governor and temperature where the system tells them, and other load.

    busy: other programs that compute, with the cores that they use.
    """

    cpu: str
    cores: int
    governor: str = ""
    temperature_c: float | None = None
    busy: tuple[tuple[str, float], ...] = ()

    @classmethod
    def read(cls) -> MachineState:
        """Read the state now; takes as long as busy_programs()."""
        return cls(
            cpu_name(),
            num_physical_cores(),
            _governor(),
            _temperature_c(),
            tuple((program.name, program.cores) for program in busy_programs()),
        )

    @property
    def is_busy(self) -> bool:
        return sum(cores for _, cores in self.busy) > _BUSY_CORES

    def lines(self) -> Iterator[str]:
        """The machine in a line, and a warning if other programs compute."""
        parts = [f"{self.cpu}, {self.cores} cores"]
        parts += [f"governor {self.governor}"] if self.governor else []
        parts += [f"{self.temperature_c:.0f} °C"] if self.temperature_c is not None else []
        yield " · ".join(parts)
        if self.is_busy:
            names = ", ".join(f"{name} ({cores:.1f} cores)" for name, cores in self.busy)
            yield f"other programs compute: {names}; a quiet machine is faster"

    def record(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "governor": self.governor,
            "temperature_c": self.temperature_c,
            "load_average": os.getloadavg()[0],
            "busy": dict(self.busy),
        }


def _governor() -> str:
    try:
        return _GOVERNOR.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _temperature_c() -> float | None:
    """The highest temperature of the processor's sensors."""
    sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()
    found = [
        each.current
        for name in ("coretemp", "k10temp", "cpu_thermal")
        for each in sensors.get(name, ())
    ]
    return max(found, default=None)
