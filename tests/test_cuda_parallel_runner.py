"""The runner over two ranks: the same text as with one, and errors leave no process behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from hf_folders import TINY
from models import LoadedBench, Reply, noisy
from test_cuda_load import loaded
from test_cuda_runner import (
    CHATS,
    GREEDY,
    MAX_NOISY,
    NOISE,
    PLAIN,
    SAMPLED,
    CudaBench,
    look_ahead,
    texts,
)

from localgen.backends.cuda.parallel import worker_group
from localgen.backends.cuda.parallel.tensor_parallel import TensorParallelExecutor
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.errors import InvalidRequest, LoadFailed, LocalgenError, OutOfMemory


class ParallelBench(LoadedBench):
    """The built-in model on two ranks."""

    def __init__(self) -> None:
        super().__init__(loaded(tp=2, kv_tokens=4096))
        assert isinstance(self.model.runner, CudaRunner)
        self.runner = self.model.runner
        assert isinstance(self.runner._executor, TensorParallelExecutor)

    def check(self) -> None:
        self.runner.kv_cache.check()


def processes() -> list[int]:
    """Running worker processes of this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if worker_group._WORKER_MODULE in child.cmdline():
                found.append(child.pid)
    return found


def assert_fails(kind: type[LocalgenError], message: str, folder: Path, **options: object) -> None:
    before = processes()
    with pytest.raises(kind, match=message):
        loaded(folder, tp=2, **options)  # type: ignore[arg-type]
    assert processes() == before


# before `bench`: a process can only be in one group of ranks
def test_a_pool_that_does_not_fit_leaves_no_process() -> None:
    assert_fails(OutOfMemory, "are free on cpu after the weights", TINY, kv_tokens=10**10)


@pytest.fixture(scope="module")
def bench() -> Iterator[ParallelBench]:
    made = ParallelBench()
    assert len(processes()) == 1
    yield made
    made.close()
    assert processes() == []


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Reply]]:
    made = CudaBench(prefix_cache=False)
    yield made.ask_one_by_one(CHATS, GREEDY)
    made.close()


def test_greedy_text_is_that_of_one_rank(bench: ParallelBench, alone: list[Reply]) -> None:
    assert noisy(bench.ask(CHATS, GREEDY), alone, NOISE) <= MAX_NOISY
    assert noisy(bench.ask_one_by_one(CHATS[:5], GREEDY), alone[:5], NOISE) <= MAX_NOISY


def test_steps_launched_ahead_change_nothing(bench: ParallelBench, alone: list[Reply]) -> None:
    look_ahead(bench.runner, True)
    replies = bench.run([bench.submit(chat, PLAIN) for chat in CHATS])
    look_ahead(bench.runner, False)
    different = sum(a != b for a, b in zip(texts(replies), texts(alone), strict=True))
    assert different <= MAX_NOISY


def test_sampled_text_is_that_of_one_rank(bench: ParallelBench) -> None:
    one = CudaBench()
    expected = one.ask(CHATS[:6], SAMPLED)
    one.close()
    pairs = zip(bench.ask(CHATS[:6], SAMPLED), expected, strict=True)
    same = sum(a.tokens == b.tokens for a, b in pairs)
    assert same >= 5, "a draw right at the border between two tokens may go either way"


def test_info_says_how_it_is_divided(bench: ParallelBench) -> None:
    info, one = bench.model.info, loaded(kv_tokens=4096).info
    assert (info.options.tp, one.options.tp) == (2, 1)
    assert "each layer is split across 2 processes (--tp)" in info.notes
    assert info.kv_bytes == one.kv_bytes
    assert one.size_bytes < info.size_bytes < 1.01 * one.size_bytes


@pytest.mark.parametrize("tp", [0, -2])
def test_zero_or_negative_ranks_are_rejected(tp: int) -> None:
    with pytest.raises(InvalidRequest, match=f"--tp is {tp}, it must be at least 1"):
        loaded(tp=tp)


def test_what_cannot_be_divided_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_WORKER_MODULE", "localgen.nothing")
    message = "--tp 3: 4 heads cannot be divided by 3: use 1, 2 or 4"
    with pytest.raises(InvalidRequest, match=message):
        loaded(tp=3)


def test_damaged_weights_leave_no_process(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_fails(LoadFailed, "model.safetensors is cut short", folder)


def test_rank_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_WORKER_MODULE", "localgen.nothing")
    message = r"cannot load .*: rank 1 \(process \d+\) ended with status 1"
    assert_fails(LoadFailed, message, TINY)
