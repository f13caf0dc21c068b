"""A draft model beside the target: its cache follows the target's, its pool is whole at the end."""

from __future__ import annotations

import random

import fake_runner
import pytest
from drafting import always_draft, decoding, speculation_of
from fake_runner import FakeRunner
from test_engine import Log, expected_text, make, request, run_until_ended

from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.runner.interface import Chunk, SampledTokens, StepFailed
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import Finished


def proposed(
    drafter: ModelDrafter, wanted: list[tuple[Sequence, int]], max_prefill: int = 256
) -> list[list[int]]:
    found = drafter.propose(dict(wanted), max_prefill)
    return [found[seq].tokens if seq in found else [] for seq, _ in wanted]


class Forgetful(FakeRunner):
    """A draft model that is wrong at every `wrong`-th token."""

    def __init__(self, wrong: int = 5, **sizes: int) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self._wrong = wrong

    def _compute(self, chunk: Chunk) -> SampledTokens:
        said = super()._compute(chunk)
        if said.tokens and len(self.cache[chunk.seq]) % self._wrong == 0:
            return SampledTokens((said.tokens[0] // 2,))
        return said


class Failing(FakeRunner):
    def collect(self, ticket: list[Chunk]) -> list[SampledTokens]:
        if len(self.steps) > 5:
            raise StepFailed("out of order")
        return super().collect(ticket)


def test_drafts_are_what_the_draft_model_says() -> None:
    runner = FakeRunner(kv_tokens=512, batch=64)
    drafter, seq = ModelDrafter(runner, "draft"), decoding(limit=512)
    seq.tokens = [5, 6, 7]
    assert len(drafter.acceptance_probs(seq, 4)) == 4
    (drafts,) = proposed(drafter, [(seq, 4)])
    assert drafts == fake_runner.generate([5, 6, 7], 7, ends=False)
    # two are right, the third is not
    seq.tokens += [*drafts[:2], 1]
    drafter.observe(seq, seq.tokens[3:])
    drafter.acceptance_probs(seq, 4)
    (after,) = proposed(drafter, [(seq, 3)])
    assert after == fake_runner.generate(seq.tokens, len(seq.tokens) + 3, ends=False)
    assert runner.computed == (3 + 3) + (1 + 2), "what is in the cache is not computed again"
    drafter.release(seq)
    runner.check()


def test_a_long_prompt_is_prefilled_in_pieces() -> None:
    runner = FakeRunner(kv_tokens=1024, batch=100)
    drafter, seq = ModelDrafter(runner, "draft"), decoding(limit=1024)
    seq.tokens = [1 + i % 90 for i in range(600)]
    pieces: list[int] = []
    drafts: list[int] = []
    while not drafts:
        assert drafter.acceptance_probs(seq, 4)
        before = runner.computed
        (drafts,) = proposed(drafter, [(seq, 2)], 160 if pieces else 40)
        pieces.append(runner.computed - before)
    assert pieces[0] == 40
    assert set(pieces[1:-1]) == {100}, "no more than the draft model's batch"
    assert drafts == fake_runner.generate(seq.tokens, 602, ends=False)


def test_prefill_and_drafts_fit_a_small_batch() -> None:
    runner = FakeRunner(kv_tokens=1024, batch=32)
    drafter, seq = ModelDrafter(runner, "draft"), decoding(limit=1024)
    seq.tokens = [1 + i % 90 for i in range(45)]
    assert drafter.acceptance_probs(seq, 4)
    (drafts,) = proposed(drafter, [(seq, 2)])
    assert drafts == fake_runner.generate(seq.tokens, 47, ends=False)
    assert max(sum(map(len, step)) for step in runner.steps) <= 32


def test_a_draft_model_is_tried_again_after_useless_text() -> None:
    # text that it cannot predict, then text that it can, each after a long prompt
    runner = FakeRunner(kv_tokens=4096, batch=512)
    drafter = ModelDrafter(runner, "draft", clock=lambda: 0.0)
    speculation = speculation_of(drafter, clock=lambda: 0.0)
    for useful in (False, True):
        drafted = 0
        for number in range(6):
            seq = decoding(f"{useful} {number}", limit=4096)
            seq.tokens = [1 + (number + i) % 90 for i in range(300)]
            seq.num_prompt = 299
            for _ in range(300):
                drafted += _step(speculation, seq, useful)
            speculation.propose([], max_outputs=0, max_prefill_tokens=0)
    assert drafted > 500
    runner.check()


def _step(speculation: Speculation, seq: Sequence, useful: bool) -> int:
    """A step of the target, which generates what the draft model would if `useful`.

    Returns the number of drafts.
    """
    found = speculation.propose([seq], max_outputs=64, max_prefill_tokens=256)
    drafts = found[seq].tokens if seq in found else []
    chunk = Chunk(
        seq=seq,
        start=len(seq.tokens) - 1,
        tokens=[seq.tokens[-1], *drafts],
        num_drafts=len(drafts),
        is_sampled=True,
    )
    for draft in [*drafts, None]:
        token = fake_runner.next_token(seq.tokens)
        token = token if useful else 7 if token != 7 else 8
        seq.tokens.append(token)
        if token != draft:
            break
    step_ms = 4.0 + 0.02 * len(chunk)
    speculation.costs.observe(len(chunk), step_ms)
    speculation.observe([chunk], step_ms)
    return len(drafts)


def test_the_shortest_prompt_is_prefilled_first() -> None:
    runner = FakeRunner(kv_tokens=2048, batch=100)
    drafter = ModelDrafter(runner, "draft")
    long, short = decoding("long", limit=1024), decoding("short", limit=1024)
    for seq, count in ((long, 900), (short, 200)):
        seq.tokens = [1 + i % 90 for i in range(count)]
        assert drafter.acceptance_probs(seq, 4)
    for _ in range(2):
        assert proposed(drafter, [(long, 4), (short, 4)], 100) == [[], []]
    (drafts,) = proposed(drafter, [(short, 4)], 0)
    assert len(drafts) == 4


def test_acceptance_of_greedy_drafts_is_estimated_from_greedy_drafts() -> None:
    drafter = ModelDrafter(FakeRunner(kv_tokens=1024, batch=100), "draft")
    seq, late = decoding("seq", limit=512), decoding("late", limit=512)
    for _ in range(60):
        drafter.acceptance_probs(seq, 4)
        ((draft,),) = proposed(drafter, [(seq, 1)])
        seq.tokens.append(7 if draft != 7 else 8)
        drafter.observe(seq, seq.tokens[-1:])
    late.tokens = [1 + i % 90 for i in range(300)]
    assert 0 < drafter.acceptance_probs(late, 4)[0] < 0.15


def test_sequence_evicted_during_prefill_is_not_drafted_for() -> None:
    runner = FakeRunner(kv_tokens=256, batch=100)
    drafter = ModelDrafter(runner, "draft", clock=lambda: 0.0)
    seqs = [decoding(str(i), limit=512) for i in range(2)]
    for at, seq in enumerate(seqs):
        seq.tokens = [1 + at + i % 90 for i in range(126)]
        drafter.acceptance_probs(seq, 4)
    for _ in range(6):
        for seq in seqs:
            seq.tokens += [5] * 20
            drafter.acceptance_probs(seq, 4)
        for _ in range(5):
            proposed(drafter, [(seq, 1) for seq in seqs if drafter.acceptance_probs(seq, 1)], 16)
    assert len(runner.cache) < 2, "both grew beyond the pool"
    for seq in seqs:
        drafter.release(seq)
    runner.check()


def test_no_draft_beyond_an_end() -> None:
    drafter, seq = ModelDrafter(FakeRunner(kv_tokens=512), "draft"), decoding(limit=512)
    end = fake_runner.generate([3, 3], 8, ends=False)[2]
    seq.stop_ids = frozenset({end})
    drafter.acceptance_probs(seq, 8)
    (drafts,) = proposed(drafter, [(seq, 6)])
    assert drafts[-1] == end
    assert len(drafts) <= 3


@pytest.mark.parametrize("draft_tokens", [40, 120, 400])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_schedules_leave_both_pools_whole(
    seed: int, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    chance = random.Random(seed)
    log, runner = Log(), FakeRunner(kv_tokens=200, max_seqs=5, batch=40)
    small = Forgetful(kv_tokens=draft_tokens, max_seqs=3, batch=16)
    engine = make(runner, log, drafters=[NgramDrafter(), ModelDrafter(small, "draft")])
    prompts = {str(i): "ab" * chance.randrange(1, 20) + str(i) for i in range(100)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=chance.randrange(1, 40)))
        for _ in range(chance.randrange(4)):
            engine.step(wait=False)
        if chance.random() < 0.2:
            engine.cancel(name)
    run_until_ended(engine, log, len(prompts))
    for name, prompt in prompts.items():
        (end,) = log.ends[name]
        assert isinstance(end, Finished), end
        assert expected_text(prompt, len(prompt) + 40).startswith(log.text[name])
    assert log.stats.speculation.accepted_tokens_total > 0
    runner.check()
    small.check()


def test_padding_is_neither_drafted_nor_read() -> None:
    text = [5, 6, 7]
    first, second = fake_runner.generate(text, 5, ends=False)
    runner = FakeRunner(kv_tokens=512)
    drafter, seq = (
        ModelDrafter(runner, "draft", shared_vocab_size=max(first, second)),
        decoding(limit=512),
    )
    seq.tokens = text
    drafter.acceptance_probs(seq, 4)
    (drafts,) = proposed(drafter, [(seq, 4)])
    assert drafts == ([first] if first < second else [])
    seq.tokens = [*text, max(first, second)]
    assert not drafter.acceptance_probs(seq, 4)
    drafter.release(seq)
    seq.tokens = [max(first, second), 5]
    assert not drafter.acceptance_probs(seq, 4)
    runner.check()


def test_a_draft_model_that_fails_takes_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    log, runner = Log(), FakeRunner(kv_tokens=512, batch=64)
    broken = Failing(kv_tokens=512, batch=64)
    engine = make(runner, log, drafters=[ModelDrafter(broken, "draft")])
    for i in range(5):
        engine.submit(request(f"{i}", f"prompt {i}", max_tokens=60))
    run_until_ended(engine, log, 5)
    for i in range(5):
        assert log.text[f"{i}"] == expected_text(f"prompt {i}", 68)
    told = log.stats.speculation
    assert told.drafters == (), "it is not listed as if it worked"
    assert "draft failed: out of order" in told.reason


def test_sequences_are_drafted_for_together() -> None:
    runner = FakeRunner(kv_tokens=512, batch=64)
    drafter = ModelDrafter(runner, "draft")
    wanted = {decoding(str(i), limit=512): count for i, count in enumerate((4, 2, 3))}
    for number, seq in enumerate(wanted):
        seq.tokens += [number]
        drafter.acceptance_probs(seq, 4)
    drafts = proposed(drafter, list(wanted.items()))
    assert [len(tokens) for tokens in drafts] == [4, 2, 3]
    assert [len(step) for step in runner.steps] == [3, 3, 2, 1], "sequences in each of its steps"


def test_draft_ms_is_measured_per_draft() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.002  # each look at the clock
        return now[0]

    drafter = ModelDrafter(FakeRunner(kv_tokens=512, batch=64), "draft", clock=clock)
    assert drafter.draft_ms() == 0.0, "not known yet"
    seqs = [decoding(str(i), limit=512) for i in range(2)]
    for seq in seqs:
        drafter.acceptance_probs(seq, 4)
    drafter.propose(dict.fromkeys(seqs, 4), 0)
    assert drafter.draft_ms() == pytest.approx(2.0)
