"""The number of threads: the cores that other processes leave free."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.llamacpp.free_cores import FreeCores, runnable_others, time_of_others


class Machine:
    """A clock, the processor time that other processes have used, and how many run now."""

    def __init__(self, cores: int, processors: int = 0) -> None:
        self.now_s = self.others_s = 0.0
        self.running = 0
        self.free = FreeCores(
            cores,
            processors=processors or cores,
            clock=lambda: self.now_s,
            read=lambda: self.others_s,
            running=lambda: self.running,
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


@pytest.mark.parametrize(
    ("others", "running", "free"),
    [
        (2.0, 2, 2),  # a build goes on
        (2.0, 1, 3),
        (2.0, 0, 4),  # a build has ended
        (0.01, 3, 4),  # the client that sends the prompt, and the server that reads it
        (9.0, 9, 1),
    ],
)
def test_after_a_pause_cores_are_taken_that_others_used_and_still_use(
    others: float, running: int, free: int
) -> None:
    machine = Machine(4)
    machine.pass_time(2.0, 0.0, pause_s=60.0)
    machine.others_s += 62.0 * others
    machine.running = running
    assert machine.free.count() == free
    machine.pass_time(0.3, 2.0)  # in an answer, only what they used counts
    assert machine.free.count() == 2


def test_the_first_answer_counts_what_others_used_while_the_model_was_loaded() -> None:
    machine = Machine(4)
    machine.now_s, machine.others_s, machine.running = 3.0, 6.0, 2
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


def test_running_threads_are_those_of_the_system_without_the_one_that_asks(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    assert runnable_others(stat) == 0
    stat.write_text("cpu  1 2 3\nprocs_running 3\nprocs_blocked 0\n")
    assert runnable_others(stat) == 2
    stat.write_text("cpu  1 2 3\n")
    assert runnable_others(stat) == 0
