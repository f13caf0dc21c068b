"""The number of threads: the cores that other processes leave free."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.llamacpp.free_cores import FreeCores, ProcessorTime, processor_time


class Machine:
    """A clock, and the processor time used so far."""

    def __init__(self, cores: int, processors: int = 0) -> None:
        self.now_s = self.own_s = self.others_s = 0.0
        self.free = FreeCores(
            cores,
            processors=processors or cores,
            clock=lambda: self.now_s,
            read=lambda: ProcessorTime(self.own_s, self.others_s),
        )

    def pass_time(self, seconds: float, busy: float, own: float = 1.0) -> None:
        """busy, own: cores used by other processes and by this one."""
        self.now_s += seconds
        self.own_s += seconds * own
        self.others_s += seconds * busy


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


def test_what_others_did_between_answers_does_not_count() -> None:
    machine = Machine(4)
    machine.pass_time(60.0, 4.0, own=0.1)
    assert machine.free.count() == 4
    machine.pass_time(0.3, 2.0)
    assert machine.free.count() == 2
    machine.pass_time(60.0, 0.0, own=0.1)
    assert machine.free.count() == 2
    machine.pass_time(3.0, 0.0)  # one long step
    assert machine.free.count() == 4


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
    for span in spans:
        machine.pass_time(*span)
        assert 1 <= machine.free.count() <= cores


def test_own_time_is_not_that_of_others() -> None:
    before = processor_time()
    while time.process_time() - before.own_s < 0.5:
        sum(range(10_000))
    own = processor_time()
    assert own.own_s - before.own_s >= 0.5
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        time.sleep(1.5)
        after = processor_time()
        loop.kill()
    assert after.own_s - own.own_s < 0.3
    assert after.others_s - own.others_s > 0.3
