"""Profile decode steps: kernels, launches, idle time, host time, cost of graph capture."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.answers import Answer
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.loaded import WatchedRunner
from benchmarks.session import Session

# in longer gaps the device waits for the host
LONG_GAP_US = 10.0
# parts of the names of host calls that launch work on the device
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


@dataclass(frozen=True, slots=True)
class Activity:
    """Device activity during some steps.

    kernels: number of kernels and copies on the device. launches: number of launch calls of the
    host. busy_s: time with at least one kernel running. waits_s: time in gaps of more than
    LONG_GAP_US.
    """

    kernels: int
    launches: int
    busy_s: float
    waits_s: float


def activity(device: Device, run: Callable[[], None]) -> Activity:
    """Profile a run. On a CPU, torch operators count as kernels."""
    kinds = torch.profiler.ProfilerActivity
    wanted = [kinds.CPU, kinds.CUDA] if device.is_gpu else [kinds.CPU]
    with torch.profiler.profile(activities=wanted) as profile:
        run()
        device.synchronize()
    events = list(profile.events() or [])
    own = "CUDA" if device.is_gpu else "CPU"
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == own and (device.is_gpu or event.name.startswith("aten::"))
    ]
    calls = sum(any(name in event.name for name in _LAUNCHES) for event in events)
    busy_us, waits_us = busy_and_waits(spans)
    return Activity(len(spans), calls, busy_us / 1e6, waits_us / 1e6)


def busy_and_waits(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the time covered by at least one span, and the sum of long gaps (microseconds)."""
    busy = waits = 0.0
    end: float | None = None
    for begin, stop in sorted(spans):
        if end is None or begin > end:
            if end is not None and begin - end > LONG_GAP_US:
                waits += begin - end
            busy += stop - begin
            end = stop
        elif stop > end:
            busy += stop - end
            end = stop
    return busy, waits


@contextmanager
def decoding(session: Session, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
    """Decode all prompts in the block; yields the durations of the first steps in seconds."""
    answers: list[Answer] = [session.submit(prompt, tokens) for prompt in prompts]
    while not all(answer.arrivals for answer in answers):
        session.step()
    yield [_step_s(session) for _ in range(_FIRST_STEPS)]
    session.cancel(answers)


# the batch shape is captured during these, and replayed afterwards
_FIRST_STEPS = 12


def _step_s(session: Session) -> float:
    begun_s = time.perf_counter()
    session.step()
    return time.perf_counter() - begun_s


def measured(
    device: Device, session: Session, prompts: Sequence[Sequence[int]], *, steps: int
) -> dict[str, float]:
    """Return the figures of a decode step of these prompts, measured over `steps` steps."""
    device.reset_peak()
    runner = session.runner
    assert isinstance(runner, WatchedRunner)
    with decoding(session, prompts, _FIRST_STEPS + 4 * steps + 100) as first_s:
        runner.waited_s = 0.0
        begun_s = time.perf_counter()
        each_s = [_step_s(session) for _ in range(steps)]
        wall_s, waited_s = time.perf_counter() - begun_s, runner.waited_s

        def some() -> None:
            for _ in range(steps):
                session.step()

        activity(device, session.step)  # the profiler's own warm-up
        seen = activity(device, some)
    step_s = statistics.median(each_s)
    return {
        "step_ms": step_s * 1e3,
        "host_us": (wall_s - waited_s) / steps * 1e6,
        "kernels": seen.kernels / steps,
        "launches": seen.launches / steps,
        "idle_share": max(0.0, 1 - seen.busy_s / wall_s),
        "waits_share": seen.waits_s / wall_s,
        "capture_ms": max(0.0, sum(first_s) - len(first_s) * step_s) * 1e3,
        "peak_gb": device.peak_gb(),
    }
