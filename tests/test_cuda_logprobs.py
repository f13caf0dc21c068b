"""Log probabilities of a step: those requested, of the right rows, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.special import log_softmax
from test_cuda_runner import CHATS, PLAIN, CudaBench

from localgen.backends.cuda.steps.logprobs import step_logprobs
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

VOCAB = 300


def chunk(tokens: int, *, drafts: int = 0, samples: bool = True, wanted: int | None) -> Chunk:
    params = replace(BASE_SAMPLING, logprobs=wanted)
    seq = Sequence(id="s", tokens=[], num_prompt=0, params=params, ctx=99, max_len=99)
    return Chunk(seq=seq, start=0, tokens=[1] * tokens, num_drafts=drafts, is_sampled=samples)


def named(token: int) -> str:
    return f"<{token}>"


def test_logprobs_are_of_the_requested_rows_only() -> None:
    """Logits are those of the sampled positions, chunk after chunk."""
    chunks = [
        chunk(1, wanted=None),
        chunk(9, samples=False, wanted=5),
        chunk(3, drafts=2, wanted=2),
        chunk(1, wanted=0),
        chunk(1, wanted=4),
    ]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.tensor([5, 17, 250, 3, 0, 299])
    said = step_logprobs(chunks, logits, tokens, 10)
    assert said is not None
    # the host gets a number for the token, and two for each of the largest count requested
    assert said.values.shape == (5, 1 + 2 * 4)
    exact = log_softmax(logits.double().numpy(), axis=1)
    assert said.for_row(10, 5, named) is None
    for row, count in ((1, 2), (2, 2), (3, 2), (4, 0), (5, 4)):
        found = said.for_row(10 + row, int(tokens[row]), named)
        assert found is not None
        best = (-exact[row]).argsort()[:count].tolist()
        assert [entry.token_id for entry in found.top] == best
        values = [entry.logprob for entry in (found.chosen, *found.top)]
        assert values == pytest.approx(exact[row][[int(tokens[row]), *best]], abs=1e-5)
        assert found.chosen.token_id == tokens[row]
        assert all(entry.text == named(entry.token_id) for entry in (found.chosen, *found.top))


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    said = step_logprobs([chunk(1, wanted=VOCAB + 1)], torch.randn(1, VOCAB), torch.tensor([7]), 0)
    assert said is not None
    found = said.for_row(0, 7, named)
    assert found is not None
    assert sorted(entry.token_id for entry in found.top) == list(range(VOCAB))


def test_no_logprobs_without_a_request() -> None:
    rows = torch.randn(1, VOCAB)
    assert step_logprobs([chunk(1, wanted=None)], rows, torch.tensor([7]), 0) is None


def test_beside_a_step_that_was_launched_ahead() -> None:
    """Rows of a new sequence come after those computed ahead."""
    wanted = replace(PLAIN, logprobs=2)
    alone = CudaBench()
    expected = alone.ask_one_by_one(CHATS[:2], wanted)
    alone.close()
    bench = CudaBench(as_on_gpu=True)
    first = bench.submit(CHATS[0], wanted)
    while not bench.replies[first].text:
        bench.engine.step(wait=False)
    assert bench.runner._run_ahead_step is not None
    second = bench.submit(CHATS[1], wanted)
    for reply, theirs in zip(bench.run([first, second]), expected, strict=True):
        assert reply.tokens == theirs.tokens
        for ours, other in zip(reply.logprobs, theirs.logprobs, strict=True):
            assert ours.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
            assert [e.token_id for e in ours.top] == [e.token_id for e in other.top]
    bench.close()
