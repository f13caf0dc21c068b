"""The number of threads: the cores that other processes leave free."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.llamacpp.free_cores import FreeCores, time_of_others


class Machine:
    """A clock, and the processor time that other processes have used."""

    def __init__(self, cores: int, processors: int = 0) -> None:
        self.now_s = self.others_s = 0.0
        self.free = FreeCores(
            cores,
            processors=processors or cores,
            clock=lambda: self.now_s,
            read=lambda: self.others_s,
        )

    def pass_time(self, seconds: float, busy: float, *, pause_s: float = 0.0) -> None:
        """Compute a step, then nothing. busy: cores used by other processes."""
        for span_s in (seconds, pause_s):
            self.now_s += span_s
            self.others_s += span_s * busy
            if span_s == seconds:
                self.free.end_step()


def test_a_busy_process_takes_a_core_and_gives_it_back() -> None:
    machine = Machine(4)
    assert machine.free.count() == 4
    machine.pass_time(0.3, 1.0)
    assert machine.free.count() == 3
    machine.pass_time(0.1, 4.0)  # too short to tell
    assert machine.free.count() == 3
    machine.pass_time(0.3, 0.2)
    assert machine.free.count() == 3  # 1.15 cores of the last 0.4 s
    machine.pass_time(0.3, 0.3)
    assert machine.free.count() == 4


@pytest.mark.parametrize(
    ("others", "free"), [(0.0, 4), (0.3, 4), (0.4, 3), (1.3, 3), (1.4, 2), (9.0, 1)]
)
def test_a_core_is_taken_by_more_than_a_third_of_its_time(others: float, free: int) -> None:
    machine = Machine(4)
    machine.pass_time(0.3, others)
    assert machine.free.count() == free


def test_short_steps_are_averaged() -> None:
    machine = Machine(4)
    counts = []
    for _ in range(40):
        counts.append(machine.free.count())
        machine.pass_time(0.01, 2.0, pause_s=0.001)
    assert counts == [4] * 23 + [2] * 17


def test_what_others_did_between_answers_does_not_count() -> None:
    machine = Machine(4)
    machine.pass_time(2.0, 0.0, pause_s=60.0)
    machine.others_s += 240.0
    assert machine.free.count() == 4
    machine.pass_time(0.3, 2.0)
    assert machine.free.count() == 2


def test_all_cores_count_as_free_after_a_pause() -> None:
    machine = Machine(4)
    machine.pass_time(0.3, 2.0)
    assert machine.free.count() == 2
    machine.pass_time(3.0, 2.0, pause_s=1.0)
    assert machine.free.count() == 4
    machine.pass_time(0.3, 2.0)
    assert machine.free.count() == 2


def test_a_busy_hyper_thread_leaves_its_core() -> None:
    machine = Machine(8, processors=16)
    machine.pass_time(0.3, 8.0)
    assert machine.free.count() == 8
    machine.pass_time(0.3, 10.0)
    assert machine.free.count() == 6


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 128.0), st.floats(0.0, 64.0))),
)
def test_at_least_one_and_at_most_all(cores: int, spans: list[tuple[float, float, float]]) -> None:
    machine = Machine(cores)
    for seconds, busy, pause_s in spans:
        machine.pass_time(seconds, busy, pause_s=pause_s)
        assert 1 <= machine.free.count() <= cores


def test_own_time_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times(percpu=True)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    own_s = time.process_time()
    monkeypatch.setattr(time, "process_time", lambda: own_s)
    before_s = time_of_others()
    monkeypatch.setattr(time, "process_time", lambda: own_s + 5.0)
    assert time_of_others() == pytest.approx(before_s - 5.0)


def test_time_of_another_process_is_counted() -> None:
    before_s = time_of_others()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        while (used_s := sum(psutil.Process(loop.pid).cpu_times()[:2])) < 0.5:
            time.sleep(0.05)
        after_s = time_of_others()
        loop.kill()
    # a hypervisor may take time that one of the two clocks counts and the other does not
    assert used_s >= 0.5
    assert after_s - before_s > 0.3
