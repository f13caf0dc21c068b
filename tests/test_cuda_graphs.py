"""The bookkeeping of CUDA graphs, on the CPU: a replay computes on the buffers of its capture."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_configs import write_config
from drafting import always_draft
from fake_capture import FakeCapture, capture_between_steps
from test_cuda_runner import CHATS, MAX_NOISY, PLAIN, CudaBench, texts
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import Int32Array, StepInputs, build_step_inputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.process_group import TensorParallelGroup
from localgen.backends.cuda.model.weights import DecoderWeights, random_weights
from localgen.backends.cuda.steps import cuda_graphs
from localgen.backends.cuda.steps.cuda_graphs import (
    WARM_UP_RUNS,
    DeviceExecutor,
    GraphShape,
    graph_shape,
    pad_inputs,
)
from localgen.backends.cuda.steps.graph_capture import GraphCapture, Replay
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.memory.compute_buffers import cuda_graph_rows
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

SEQUENCES, MAX_LEN, VOCAB = 5, 96, 96
# sequence, start, tokens, number of outputs
Part = tuple[int, int, list[int], int]


@pytest.fixture
def captured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are captured before their second step, as if no request ran."""
    capture_between_steps(monkeypatch)


class Steps:
    """Random steps of a few sequences, on shuffled pages."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, **options: Any) -> None:
        each = pages_for(MAX_LEN)
        cache = KVCache.zeros(spec, each * SEQUENCES, device="cpu", dtype=torch.float32)
        for tensor in (part for layer in cache.layers for part in layer.tensors):
            tensor.fill_(torch.nan)
        pages = np.random.default_rng(0).permutation(each * SEQUENCES).astype(np.int32)
        self.tables = pages.reshape(SEQUENCES, each)
        self.executor = DeviceExecutor(Decoder(spec, weights, MAX_LEN), cache, **options)

    def run(self, parts: list[Part]) -> Tensor:
        """Logits of the outputs of each part."""
        inputs = step_inputs(parts, lambda seq: self.tables[int(seq.id)])
        return self.executor.run(inputs).clone()


def step_inputs(parts: list[Part], table: Callable[[Sequence], Int32Array]) -> StepInputs:
    chunks = [
        Chunk(
            seq=Sequence(
                id=str(number),
                tokens=[],
                num_prompt=0,
                params=BASE_SAMPLING,
                ctx=MAX_LEN,
                max_len=MAX_LEN,
            ),
            start=start,
            tokens=tokens,
            num_drafts=max(0, outputs - 1),
            is_sampled=outputs > 0,
        )
        for number, start, tokens, outputs in parts
    ]
    return build_step_inputs(chunks, table)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, DecoderWeights]:
    spec = read_hf_config(write_config(tmp_path_factory.mktemp("model"), "llama"))
    return spec, random_weights(spec, device="cpu", dtype=torch.float32, seed=0)


def prefill(steps: Steps, length: int = 20) -> None:
    for number in range(SEQUENCES):
        steps.run([(number, 0, [(7 * i + number) % VOCAB for i in range(length)], 1)])


def decode(count: int, position: int = 20) -> list[Part]:
    """One token of each of the first `count` sequences."""
    return [(number, position, [number + 1], 1) for number in range(count)]


def random_step(rng: random.Random, max_rows: int) -> list[Part]:
    """Tokens after some of the 20 of each sequence, in place of those that are there."""
    parts: list[Part] = []
    for number in rng.sample(range(SEQUENCES), rng.randint(1, SEQUENCES)):
        rows = rng.randint(1, max_rows)
        tokens = [rng.randrange(VOCAB) for _ in range(rows)]
        parts.append((number, rng.randint(1, 20), tokens, rng.randint(0, rows)))
    return parts


def assert_same_cache(one: Steps, other: Steps) -> None:
    for ours, theirs in zip(one.executor.cache.layers, other.executor.cache.layers, strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        # start and rows of each sequence
        ([(0, 1)], GraphShape(1, 1024)),
        ([(7, 1), (1023, 1), (0, 1)], GraphShape(4, 1024)),
        ([(7, 1), (1024, 1)], GraphShape(2, 2048)),
        ([(7, 1)] * 256, GraphShape(256, 1024)),
        ([(7, 1)] * 257, None),
        ([(7, 2)], GraphShape(1, 1024, 2)),
        ([(7, 6)], GraphShape(1, 1024, 8)),
        ([(7, 9)], None),
        ([(0, 4)], None),
        ([(7, 1), (0, 4)], None),
        # fewer rows than the longest sequence has, for each
        ([(7, 4), (7, 1), (7, 1)], GraphShape(4, 1024, 2)),
        ([(7, 2), (7, 1)], GraphShape(2, 1024, 2)),
        ([(7, 8)] * 16, GraphShape(16, 1024, 8)),
        ([(7, 2)] + [(7, 1)] * 16, None),
    ],
)
def test_shapes(rows: list[tuple[int, int]], shape: GraphShape | None) -> None:
    parts: list[Part] = [(i, start, [3] * count, 1) for i, (start, count) in enumerate(rows)]
    inputs = step_inputs(parts, lambda _: np.zeros(pages_for(2048), np.int32))
    assert graph_shape(inputs) == shape
    if shape is not None:
        padded = pad_inputs(inputs, shape)
        assert len(padded.tokens) == len(padded.output_rows) == shape.num_rows
        assert (padded.slot_mapping[len(inputs.tokens) :] == -1).all()
        assert (padded.query_starts[len(rows) :] == len(inputs.tokens)).all()


@pytest.mark.usefixtures("captured_early")
@pytest.mark.parametrize(("max_rows", "num_steps"), [(1, 60), (8, 150)])
def test_replayed_steps_equal_eager_ones(
    model: tuple[ModelSpec, DecoderWeights], max_rows: int, num_steps: int
) -> None:
    """Logits, and the KV cache: padding stores nothing."""
    capture, rng = FakeCapture(), random.Random(1)
    eager = Steps(*model, use_cuda_graphs=False)
    graphs = Steps(*model, use_cuda_graphs=True, capture=capture)
    prefill(eager)
    prefill(graphs)
    for _ in range(num_steps):
        parts = random_step(rng, max_rows)
        torch.testing.assert_close(graphs.run(parts), eager.run(parts))
        if rng.random() < 0.1:
            graphs.executor.capture_next()
    assert_same_cache(graphs, eager)
    assert capture.replays > num_steps // 3
    captured = {(shape.num_seqs, shape.rows_per_seq) for shape in graphs.executor._graphs}
    if max_rows == 1:
        assert captured == {(1, 1), (2, 1), (4, 1), (8, 1)}
    else:
        assert {(1, 8), (4, 5)} <= captured


def test_a_shape_is_captured_when_idle_and_never_before(
    model: tuple[ModelSpec, DecoderWeights],
) -> None:
    capture = FakeCapture()
    steps = Steps(*model, use_cuda_graphs=True, capture=capture)
    assert not steps.executor.capture_next(), "nothing has run yet"
    steps.run(decode(1))
    (shape,) = steps.executor._eager_runs
    steps.executor._eager_runs[shape] = 1_000_000
    steps.run(decode(1))
    assert capture.captures == 0
    assert steps.executor.capture_next()
    steps.run(decode(1))
    assert (capture.captures, capture.replays) == (1, 1)
    steps.run(decode(2))
    for _ in range(3):
        steps.run(decode(4))
    assert steps.executor.capture_next()
    assert (capture.captures, capture.replays) == (2, 1)
    steps.run(decode(4))
    assert capture.replays == 2, "the shape that ran most often comes first"
    steps.run(decode(2))
    assert capture.replays == 2
    assert steps.executor.capture_next()
    assert not steps.executor.capture_next()


@pytest.mark.usefixtures("captured_early")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore of it"), "out of memory. Tried"),
        (RuntimeError("operation not permitted\nmore of it"), "operation not permitted"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_shape_whose_capture_fails_runs_eagerly(
    model: tuple[ModelSpec, DecoderWeights],
    error: Exception,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture = FakeCapture(error)
    eager = Steps(*model, use_cuda_graphs=False)
    steps = Steps(*model, use_cuda_graphs=True, capture=capture)
    prefill(eager)
    prefill(steps)
    with caplog.at_level(logging.WARNING):
        for _ in range(24):
            torch.testing.assert_close(steps.run(decode(3)), eager.run(decode(3)))
    assert not steps.executor.capture_next()
    assert capture.captures == 1
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("steps of 4 rows in 4 sequences of up to 1024 tokens run without a CUDA")
    assert said.endswith(message)
    capture.error = None
    for _ in range(2):
        steps.run(decode(1))
    assert capture.replays == 1, "other shapes are captured"


def with_graphs(bench: CudaBench, capture: FakeCapture) -> CudaBench:
    assert isinstance(bench.runner._executor, DeviceExecutor)
    bench.runner._executor._capture = capture
    return bench


@pytest.mark.usefixtures("captured_early")
@pytest.mark.parametrize("drafting", [False, True])
def test_answers_with_graphs_are_those_without(
    drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, capture = CudaBench(), FakeCapture()
    expected = texts(plain.ask(CHATS, PLAIN))
    plain.close()
    always_draft(monkeypatch)
    drafters = [NgramDrafter()] if drafting else []
    bench = with_graphs(CudaBench(as_on_gpu=True, parallel=6, drafters=drafters), capture)
    bench.engine._speculation._max_drafts = 3
    different = sum(a != b for a, b in zip(texts(bench.ask(CHATS, PLAIN)), expected, strict=True))
    assert different <= MAX_NOISY
    assert capture.replays > 20
    shapes = bench.runner._executor._graphs  # type: ignore[attr-defined]
    assert any(shape.rows_per_seq > 1 for shape in shapes) == drafting
    bench.close()


def test_captures_wait_until_no_request_runs() -> None:
    bench = CudaBench(as_on_gpu=True)
    busy: list[bool] = []

    class SeenCapture(FakeCapture):
        def __call__(self, forward: Callable[[], object]) -> Replay:
            busy.append(bench.engine._scheduler.has_work)
            return super().__call__(forward)

    with_graphs(bench, SeenCapture())
    engine = threading.Thread(target=bench.engine.run)
    engine.start()
    long = replace(PLAIN, max_tokens=60, ignore_eos=True)
    replies = [bench.replies[bench.submit(chat, long)] for chat in CHATS[:3]]
    deadline_s = time.monotonic() + 60
    while any(reply.end is None for reply in replies) or not busy:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    bench.engine.stop()
    engine.join(60)
    assert [reply.finished.completion_tokens for reply in replies] == [60] * 3
    assert not any(busy)
    bench.close()


@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 16, 17, 100, 256])
def test_the_buffers_have_room_for_the_largest_graph(sequences: int) -> None:
    sizes = [(sequences, 1), *((count, 8) for count in range(1, min(sequences, 16) + 1))]
    largest = 0
    for count, rows in sizes:
        parts: list[Part] = [(number, 7, [3] * rows, 1) for number in range(count)]
        shape = graph_shape(step_inputs(parts, lambda _: np.zeros(1, np.int32)))
        assert shape is not None
        largest = max(largest, shape.num_rows)
    assert largest <= cuda_graph_rows(sequences) < 2 * largest


def test_without_memory_for_a_capture_it_is_tried_again_much_later(
    model: tuple[ModelSpec, DecoderWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "RETRY_RUNS", 30)
    capture = FakeCapture(errors=[torch.OutOfMemoryError("out of memory")])
    steps = Steps(*model, use_cuda_graphs=True, capture=capture, max_seqs=SEQUENCES)
    prefill(steps)
    steps.run(decode(1))
    assert steps.executor.capture_next()
    for _ in range(30):
        steps.run(decode(1))
        assert not steps.executor.is_warming_up
        assert not steps.executor.capture_next()
    steps.run(decode(1))
    assert steps.executor.is_warming_up
    assert steps.executor.capture_next()
    steps.run(decode(1))
    assert (capture.captures, capture.replays) == (2, 1)


class RankBesideOneWithoutMemory(TensorParallelGroup):
    __slots__ = ()

    def max_over_ranks(self, value: int) -> int:
        return max(value, 1)


@pytest.mark.usefixtures("captured_early")
def test_a_graph_that_another_rank_lacks_is_not_used(
    model: tuple[ModelSpec, DecoderWeights], caplog: pytest.LogCaptureFixture
) -> None:
    capture = FakeCapture()
    steps = Steps(*model, use_cuda_graphs=True, capture=capture)
    steps.executor.decoder._group = RankBesideOneWithoutMemory(ModelShard(model[0]))
    prefill(steps)
    with caplog.at_level(logging.WARNING):
        for _ in range(16):
            steps.run(decode(1))
    assert (capture.captures, capture.replays) == (1, 0)
    (record,) = caplog.records
    assert record.getMessage().endswith("another rank failed")


def test_the_first_steps_of_a_shape_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer, and drafts would be given up because of them."""
    bench = with_graphs(CudaBench(as_on_gpu=True), FakeCapture())
    executor, measured, observe = bench.runner._executor, list[bool](), StepCosts.observe

    def observed(costs: StepCosts, tokens: int, ms: float) -> None:
        measured.append(executor.is_warming_up)
        observe(costs, tokens, ms)

    monkeypatch.setattr(StepCosts, "observe", observed)
    bench.run([bench.submit(CHATS[0], replace(PLAIN, max_tokens=40, ignore_eos=True))])
    bench.close()
    assert not any(measured)
    assert len(measured) == 40 - WARM_UP_RUNS


def test_after_captures_all_steps_are_measured_anew() -> None:
    bench = with_graphs(CudaBench(as_on_gpu=True), FakeCapture())
    bench.ask(CHATS[:1], replace(PLAIN, max_tokens=40, ignore_eos=True))
    costs = bench.engine._budget.decode_costs
    assert 1 in costs
    assert bench.engine._prepare_while_idle()
    assert 1 not in costs
    assert not bench.engine._prepare_while_idle()
    bench.ask(CHATS[:1], replace(PLAIN, max_tokens=8, ignore_eos=True))
    assert 1 in costs
    bench.close()


class TorchGraphs:
    """What torch does to streams and pools in captures. end_fails: cudaStreamEndCapture does.

    captures: the pool of each. open: pools that the allocator takes for being captured into. uses:
    graphs of each pool.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.end_fails, self.stream = False, "main"
        self.captures: list[int] = []
        self.open: set[int] = set()
        self.uses: Counter[int] = Counter()
        self._pools = iter(range(1, 9))
        for module, name, stand_in in (
            (torch.cuda, "CUDAGraph", self._graph),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", lambda: self.stream),
            (torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream)),
            (torch.cuda, "graph_pool_handle", lambda: next(self._pools)),
            (torch.cuda, "graph", self._capture),
            (torch._C, "_cuda_endAllocateToPool", self._end),
            (torch._C, "_cuda_releasePool", lambda _, pool: self.uses.subtract([pool])),
        ):
            patch.setattr(module, name, stand_in, raising=False)
        self.max_bytes = 1000
        patch.setattr(GraphCapture, "_reserve", lambda _, num_bytes: self._reserve(num_bytes))

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise torch.OutOfMemoryError

    def _graph(self) -> Any:
        found = type("Graph", (), {"pool": None, "replay": lambda _: None})()

        def reset() -> None:
            if found.pool is not None:
                self.uses[found.pool] -= 1

        found.reset = reset
        return found

    @contextmanager
    def _capture(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert pool not in self.open, "already recording to this pool"
        self.captures.append(pool)
        self.open.add(pool)
        self.uses[pool] += 1
        self.stream = "capture"
        try:
            yield
        finally:
            if self.end_fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.open.remove(pool)
            graph.pool, self.stream = pool, "main"

    def _end(self, device: int, pool: int) -> None:
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)


def test_a_capture_that_raises_leaves_pool_and_stream_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, capture = TorchGraphs(monkeypatch), GraphCapture(1000)
    capture(lambda: None)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 // 0)
    assert (found.stream, found.open, found.uses) == ("main", set(), {1: 2})
    capture(lambda: None)
    assert found.captures == [1, 1, 1, 1], "the first one reserves memory"
    assert found.uses == {1: 3}


def test_without_memory_for_the_largest_graph_smaller_ones_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, capture = TorchGraphs(monkeypatch), GraphCapture(1001)
    capture(lambda: None)
    capture(lambda: None)
    assert found.captures == [1, 2, 2, 2], "the first reservation failed"
    assert (found.stream, found.open) == ("main", set())


def test_a_capture_that_cannot_be_ended_is_closed_for_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, capture = TorchGraphs(monkeypatch), GraphCapture(1000)
    capture(lambda: None)
    for failures in (1, 2):  # of a capture, then of the reservation
        found.end_fails = True
        with pytest.raises(RuntimeError, match="previous error during capture"):
            capture(lambda: None)
        found.end_fails = False
        assert (found.stream, found.open) == ("main", set())
        assert sum(found.uses.values()) == 2, failures
    capture(lambda: None)
    assert found.captures == [1, 1, 1, 2, 3, 3]
    assert found.uses == {1: 2, 2: 0, 3: 2}
