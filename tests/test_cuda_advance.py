"""Decode steps whose inputs are made on the device, by FakeCapture: they are what the host has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from fake_capture import FakeCapture, capture_between_steps
from test_cuda_graphs import with_graphs
from test_cuda_runner import CHATS, MAX_NOISY, PLAIN, SAMPLED, CudaBench, texts
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.cuda.steps import cuda_graphs
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor, pad_inputs
from localgen.backends.cuda.steps.decode_batch import DecodeBatch
from localgen.backends.cuda.steps.run_ahead import RunAheadStep, next_step_inputs
from localgen.backends.runner.interface import NoRoom
from localgen.backends.runner.sequence import Sequence as EngineSequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

LONG = replace(PLAIN, max_tokens=100, ignore_eos=True)


class Advances:
    """Compares the inputs of each step of a batch with those that the host would send.

    advanced: whether they were made on the device.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.advanced: list[bool] = []
        self._launch = CudaRunner._launch_batch_ahead
        patch.setattr(
            CudaRunner, "_launch_batch_ahead", lambda runner, *each: self._check(runner, *each)
        )

    def _check(
        self, runner: CudaRunner, tokens: Tensor, batch: DecodeBatch, ahead: RunAheadStep
    ) -> None:
        executor = runner._executor
        assert isinstance(executor, DeviceExecutor)
        sent: list[object] = []
        run = executor.run
        executor.run = lambda *each: (sent.append(each), run(*each))[1]  # type: ignore
        try:
            self._launch(runner, tokens, batch, ahead)
        finally:
            del executor.run
        last, found = executor._last_decode, runner._run_ahead_step
        self.advanced.append(not sent)
        if last is None:
            return
        assert found is not None
        assert found.positions == (batch.positions + 1).tolist()
        tables = partial(runner.kv_cache.page_tables, runner.kv_cache.slots(batch.seqs))
        starts = [seq.num_computed for seq in batch.seqs]
        exact = next_step_inputs(starts, tables, range(len(starts)))
        padded, inputs = pad_inputs(exact, last.shape), executor._batches[last.shape]
        assert last.max_len == exact.max_seq_len
        assert inputs.tokens[: len(starts)].tolist() == tokens.tolist()
        assert inputs.positions.tolist() == padded.positions.tolist()
        assert inputs.slot_mapping.tolist() == padded.slot_mapping.tolist()
        assert inputs.output_rows.tolist() == padded.output_rows.tolist()
        metadata = inputs.attn_metadata
        assert metadata.seq_lens.tolist() == padded.seq_lens.tolist()
        assert metadata.query_starts.tolist() == padded.query_starts.tolist()
        for ours, theirs, length in zip(
            metadata.page_tables.tolist(), padded.page_tables.tolist(), padded.seq_lens, strict=True
        ):
            pages = pages_for(int(length))
            assert ours[:pages] == theirs[:pages]


@pytest.fixture
def advances(monkeypatch: pytest.MonkeyPatch) -> Advances:
    capture_between_steps(monkeypatch)
    return Advances(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    bench = CudaBench(prefix_cache=False)
    yield texts(bench.ask(CHATS[:8], LONG))
    bench.close()


def different(bench: CudaBench, asked: list[str], expected: list[str]) -> int:
    return sum(a != b for a, b in zip(texts(bench.run(asked)), expected, strict=True))


def test_one_answer_sends_its_inputs_once(advances: Advances, expected: list[str]) -> None:
    bench = with_graphs(CudaBench(as_on_gpu=True), FakeCapture())
    assert different(bench, [bench.submit(CHATS[0], LONG)], expected[:1]) <= MAX_NOISY
    advances.advanced.clear()
    assert different(bench, [bench.submit(CHATS[1], LONG)], expected[1:2]) <= MAX_NOISY
    # one step before the graph has its first inputs, and the end of the answer
    assert advances.advanced.count(False) <= 1
    assert len(advances.advanced) >= LONG.max_tokens - 3  # type: ignore[operator]
    bench.close()


def test_sequences_that_join_end_and_are_preempted(
    advances: Advances, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are replaced by those of the prefix tree, and shapes become too short."""
    monkeypatch.setattr(cuda_graphs, "MIN_GRAPH_LEN", 32)
    bench = with_graphs(CudaBench(as_on_gpu=True, ctx=176, kv_tokens=500), FakeCapture())
    asked = [bench.submit(chat, LONG) for chat in CHATS[:8]]
    assert different(bench, asked, expected) <= MAX_NOISY
    assert bench.stats.num_preemptions_total > 0
    assert advances.advanced.count(True) > 60
    bench.close()


def test_pages_that_the_prefix_tree_replaces_are_sent(
    advances: Advances, expected: list[str]
) -> None:
    """Two sequences of the same tokens share their pages once these are published."""
    bench = with_graphs(CudaBench(as_on_gpu=True), FakeCapture())
    asked = [bench.submit(CHATS[0], LONG) for _ in range(2)]
    while advances.advanced.count(True) < 20:
        bench.engine.step(wait=False)
    one, other = bench.engine._scheduler.running
    cache, length = bench.runner.kv_cache, len(one.tokens) // PAGE_TOKENS * PAGE_TOKENS
    assert one.tokens[:length] == other.tokens[:length]
    tokens = [1] * (bench.runner.limits.kv_tokens + 1)
    huge = EngineSequence(
        id="huge", tokens=tokens, num_prompt=1, params=BASE_SAMPLING, ctx=9, max_len=9
    )
    before = cache.page_table(other).tolist()
    with pytest.raises(NoRoom):
        bench.runner.admit(huge, spare=0)
    assert cache.page_table(other).tolist() != before
    advances.advanced.clear()
    bench.engine.step(wait=False)
    assert advances.advanced == [False], "all inputs were sent"
    assert different(bench, asked, 2 * expected[:1]) <= MAX_NOISY
    bench.close()


def test_requests_of_every_kind_and_a_cancel(advances: Advances, expected: list[str]) -> None:
    kinds = [
        LONG,
        SAMPLED,
        replace(LONG, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=60, seed=3, regex=r"[a-f]{30}-\d{20,40}"),
        replace(LONG, repeat_penalty=1.3, repeat_last_n=32),
        LONG,
    ]
    plain = CudaBench()
    without = texts(plain.ask_one_by_one(CHATS[:1], LONG))
    assert without == expected[:1]
    bench = with_graphs(CudaBench(as_on_gpu=True), FakeCapture())
    for _ in range(2):
        asked = [bench.submit(chat, kind) for chat, kind in zip(CHATS, kinds, strict=False)]
        while not bench.replies[asked[5]].text:
            bench.engine.step(wait=False)
        bench.engine.cancel(asked[5])
        bench.run(asked)
    references = [plain.ask([chat], kind)[0] for chat, kind in zip(CHATS, kinds[:5], strict=False)]
    replies = [bench.replies[name] for name in asked[:5]]
    assert sum(a.text != b.text for a, b in zip(replies, references, strict=True)) <= MAX_NOISY
    assert [len(reply.logprobs) for reply in replies] == [len(r.logprobs) for r in references]
    assert advances.advanced.count(True) > 60
    plain.close()
    bench.close()
