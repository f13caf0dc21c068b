"""Profile steps: kernels and their times, launches, idle time, host time, cost of graph capture."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.answers import Answer
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.loaded import WatchedRunner
from benchmarks.gpu_parts.report import KernelTime
from benchmarks.session import Session

# in longer gaps the device waits for the host
LONG_GAP_US = 10.0
# parts of the names of host calls that launch work on the device
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


@dataclass(frozen=True, slots=True)
class Activity:
    """Device activity during some steps.

    spans: name, begin and end of each kernel and copy on the device, in microseconds. launches:
    number of launch calls of the host.
    """

    spans: tuple[tuple[str, float, float], ...]
    launches: int

    @property
    def busy_and_waits_s(self) -> tuple[float, float]:
        """Time with at least one kernel running, and time in gaps of more than LONG_GAP_US."""
        busy_us, waits_us = busy_and_waits((begin, end) for _, begin, end in self.spans)
        return busy_us / 1e6, waits_us / 1e6

    def kernel_times(self, steps: int) -> tuple[KernelTime, ...]:
        """Time by kernel, longest first, per step."""
        by_name: defaultdict[str, list[float]] = defaultdict(list)
        for name, begin, end in self.spans:
            by_name[name].append(end - begin)
        found = [
            KernelTime(name, len(took) / steps, sum(took) / steps, statistics.median(took))
            for name, took in by_name.items()
        ]
        return tuple(sorted(found, key=lambda kernel: -kernel.total_us))


def activity(device: Device, run: Callable[[], None]) -> Activity:
    """Profile a run. On a CPU, torch operators count as kernels."""
    profile = _profile(device, run)
    events = list(profile.events() or [])
    own = "CUDA" if device.is_gpu else "CPU"
    spans = tuple(
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == own and (device.is_gpu or event.name.startswith("aten::"))
    )
    calls = sum(any(name in event.name for name in _LAUNCHES) for event in events)
    return Activity(spans, calls)


def _profile(device: Device, run: Callable[[], object]) -> Any:
    kinds = torch.profiler.ProfilerActivity
    wanted = [kinds.CPU, kinds.CUDA] if device.is_gpu else [kinds.CPU]
    with torch.profiler.profile(activities=wanted) as profile:
        run()
        device.synchronize()
    return profile


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
def decoding(
    session: Session, prompts: Sequence[Sequence[int]], tokens: int
) -> Iterator[list[Answer]]:
    """Decode all prompts in the block."""
    answers = [session.submit(prompt, tokens) for prompt in prompts]
    while not all(answer.arrivals for answer in answers):
        session.step()
    yield answers
    session.cancel(answers)


# length of answers after which the graphs of their steps are captured, and steps that come before
# those that are measured
_FIRST_STEPS = 12


def _capture_s(session: Session, prompts: Sequence[Sequence[int]]) -> float:
    """Answer these prompts without CUDA graphs; returns the time that capturing them took."""
    with decoding(session, prompts, answer_tokens(0)) as answers:
        # several tokens arrive together where steps are short
        while any(each.end is None and each.num_tokens < _FIRST_STEPS for each in answers):
            session.step()
    begun_s = time.perf_counter()
    session.prepare()
    return time.perf_counter() - begun_s


def answer_tokens(steps: int) -> int:
    """Length of the answers that `decode_step` needs."""
    return _FIRST_STEPS + 4 * steps + 100


def _step_s(session: Session) -> float:
    begun_s = time.perf_counter()
    session.step()
    return time.perf_counter() - begun_s


def decode_step(
    device: Device, session: Session, prompts: Sequence[Sequence[int]], *, steps: int
) -> tuple[dict[str, float], tuple[KernelTime, ...]]:
    """Return the figures of a decode step of these prompts, and its time by kernel."""
    device.reset_peak()
    runner = session.runner
    assert isinstance(runner, WatchedRunner)
    capture_s = _capture_s(session, prompts)
    with decoding(session, prompts, answer_tokens(steps)):
        for _ in range(_FIRST_STEPS):
            session.step()
        runner.waited_s = 0.0
        begun_s = time.perf_counter()
        each_s = [_step_s(session) for _ in range(steps)]
        wall_s, waited_s = time.perf_counter() - begun_s, runner.waited_s

        def some() -> None:
            for _ in range(steps):
                session.step()

        _profile(device, session.step)  # its own warm-up
        seen = activity(device, some)
    step_s = statistics.median(each_s)
    busy_s, waits_s = seen.busy_and_waits_s
    figures = {
        "step_ms": step_s * 1e3,
        "host_us": (wall_s - waited_s) / steps * 1e6,
        "kernels": len(seen.spans) / steps,
        "launches": seen.launches / steps,
        "idle_share": max(0.0, 1 - busy_s / wall_s),
        "waits_share": waits_s / wall_s,
        "capture_ms": capture_s * 1e3,
        "peak_gb": device.peak_gb(),
    }
    return figures, seen.kernel_times(steps)


def prefill(
    device: Device, session: Session, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, float], tuple[KernelTime, ...]]:
    """Return the figures of the last of these prompts, and its time by kernel."""
    for prompt in prompts[:-1]:  # warm-up: compile
        session.ask([prompt], 1)

    def last() -> None:
        session.ask(prompts[-1:], 1)

    seen = activity(device, last)
    busy_s, waits_s = seen.busy_and_waits_s
    figures = {
        "busy_ms": busy_s * 1e3,
        "waits_ms": waits_s * 1e3,
        "kernels": float(len(seen.spans)),
        "launches": float(seen.launches),
    }
    return figures, seen.kernel_times(1)
