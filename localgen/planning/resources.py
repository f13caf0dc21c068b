"""Memory and memory bandwidth available to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from localgen.backends.memory.system import RESERVED_BYTES, available_memory_bytes
from localgen.config import ServerSettings
from localgen.machine.bandwidth import Bandwidth, gpu_bandwidth, memory_bandwidth
from localgen.machine.gpus import Gpu
from localgen.machine.step_times import StepTimes, step_times
from localgen.placement.backend_choice import Hardware, detect_hardware


@dataclass(frozen=True, slots=True)
class MachineResources:
    """ram_bytes: main memory for models. The functions measure on the first call."""

    hardware: Hardware
    ram_bytes: int
    ram_bandwidth: Callable[[], Bandwidth]
    gpu_bandwidth: Callable[[Gpu], Bandwidth | None]
    step_times: Callable[[], StepTimes | None]


def machine_resources(
    notify: Callable[[str], None], *, remeasure: bool = False
) -> MachineResources:
    """Resources of this machine now, within LOCALGEN_MEMORY_LIMIT."""
    limit = ServerSettings.from_environment().memory_limit
    room = max(0, available_memory_bytes() - RESERVED_BYTES)
    return MachineResources(
        hardware=detect_hardware(),
        ram_bytes=room if limit is None else min(room, limit),
        # once for all plans: on a busy machine each measurement differs
        ram_bandwidth=cache(partial(memory_bandwidth, remeasure=remeasure)),
        gpu_bandwidth=cache(partial(gpu_bandwidth, remeasure=remeasure)),
        step_times=cache(partial(step_times, notify, remeasure=remeasure)),
    )
