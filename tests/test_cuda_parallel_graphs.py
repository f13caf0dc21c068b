"""CUDA graphs on two ranks: both capture the same shapes, and none has a graph alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tp_graph_worker
from models import Reply, noisy
from test_cuda_parallel_runner import ParallelBench
from test_cuda_runner import CHATS, GREEDY, MAX_NOISY, NOISE, CudaBench, look_ahead
from tp_graph_worker import executor_with_graphs, report

from localgen.backends.cuda.parallel import rank_model, worker_group
from localgen.backends.cuda.parallel.tensor_parallel import TensorParallelExecutor


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Reply]]:
    made = CudaBench(prefix_cache=False)
    yield made.ask_one_by_one(CHATS[:6], GREEDY)
    made.close()


@pytest.mark.parametrize(
    ("our_error", "their_error"),
    [("", ""), ("", "memory"), ("failed", "")],
    ids=["both-capture", "the-other-lacks-memory", "only-the-other-captures"],
)
def test_ranks_have_the_same_graphs(
    our_error: str,
    their_error: str,
    alone: list[Reply],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = tmp_path / "report"
    monkeypatch.setenv("FAKE_CAPTURE_ERROR", their_error)
    monkeypatch.setenv("FAKE_CAPTURE_REPORT", str(written))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(worker_group, "_WORKER_MODULE", tp_graph_worker.__name__)
    monkeypatch.setattr(rank_model, "DeviceExecutor", executor_with_graphs(our_error))
    bench = ParallelBench()
    assert isinstance(bench.runner._executor, TensorParallelExecutor)
    executor = bench.runner._executor._rank_model.executor
    look_ahead(bench.runner, True)
    assert noisy(bench.ask_one_by_one(CHATS[:2], GREEDY), alone[:2], NOISE) <= MAX_NOISY
    while bench.runner.prepare_while_idle():
        pass
    assert noisy(bench.ask(CHATS[:6], GREEDY), alone[:6], NOISE) <= MAX_NOISY
    while bench.runner.prepare_while_idle():
        pass
    ours = report(executor)
    bench.close()
    assert ours == written.read_text()
    assert ours.count("True") > 1
    assert ours.count("False") == bool(our_error or their_error)
