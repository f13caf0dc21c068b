"""The memory that a plan may count on, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from localgen.backends.memory.system import SPARED_BYTES, available_bytes
from localgen.config import Settings
from localgen.machine.bandwidth import Bandwidth, gpu_bandwidth, memory_bandwidth
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Hardware, this_machine


@dataclass(frozen=True, slots=True)
class Machine:
    """ram_bytes: what models may have of main memory. ram, gpu: how fast they are read, asked
    only where it matters."""

    hardware: Hardware
    ram_bytes: int
    ram: Callable[[], Bandwidth]
    gpu: Callable[[Gpu], Bandwidth | None]


def machine_here(*, measure_again: bool = False) -> Machine:
    """This one, now, within LOCALGEN_MEMORY_LIMIT."""
    limit = Settings.from_environment().memory_limit
    room = max(0, available_bytes() - SPARED_BYTES)
    return Machine(
        hardware=this_machine(),
        ram_bytes=room if limit is None else min(room, limit),
        # once for all plans: a busy machine would give each another figure
        ram=cache(partial(memory_bandwidth, again=measure_again)),
        gpu=cache(partial(gpu_bandwidth, again=measure_again)),
    )
