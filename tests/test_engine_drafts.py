"""The engine loop with drafts: the same answers in fewer steps, whatever is proposed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import fake_runner
import pytest
from drafting import always_draft
from fake_runner import VOCAB, FakeRunner
from test_engine import Log, expected_text, make, request, run_until_ended, until_prepared

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.runner.interface import Chunk, NoRoom, SampledTokens
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import Failed, Finished

next_token = fake_runner.next_token


def repeating(tokens: list[int]) -> int:
    """A model that mostly repeats the token of seven positions before."""
    fresh = next_token(tokens)
    return tokens[-7] if len(tokens) > 7 and fresh % 11 else fresh


class Oracle(Drafter):
    """Proposes what the model will generate, sometimes wrong."""

    name = "oracle"

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.known: set[str] = set()
        self.closed = False

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        self.known.add(seq.id)
        return [0.9] * max_drafts

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        return {seq: DraftProposal(self._ahead(seq, count)) for seq, count in requests.items()}

    def _ahead(self, seq: Sequence, count: int) -> list[int]:
        tokens = list(seq.tokens)
        for _ in range(count):
            right = self._chance.random() < 0.8
            tokens.append(next_token(tokens) if right else self._chance.randrange(VOCAB))
        return tokens[len(seq.tokens) :]

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        assert list(new_tokens) == seq.tokens[len(seq.tokens) - len(new_tokens) :]

    def release(self, seq: Sequence) -> None:
        self.known.discard(seq.id)

    def close(self) -> None:
        self.closed = True


class Cramped(FakeRunner):
    """Raises NoRoom for drafts only in the step, as llama.cpp may."""

    def collect(self, ticket: list[Chunk]) -> list[SampledTokens]:
        if any(chunk.num_drafts for chunk in ticket):
            self.in_flight = False
            raise NoRoom
        return super().collect(ticket)


def test_no_room_for_drafts_costs_the_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    log, runner = Log(), Cramped(kv_tokens=512, batch=64)
    engine = make(runner, log, drafters=[Oracle(1)])
    engine.submit(request("a", "prompt", max_tokens=40))
    run_until_ended(engine, log, 1)
    assert log.text["a"] == expected_text("prompt", 46)
    assert log.stats.num_preemptions_total == 0
    runner.check()


def test_the_same_text_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)
    steps = {}
    for drafters in ([], [Oracle(1)]):
        log, runner = Log(), FakeRunner(kv_tokens=1024, batch=64)
        engine = make(runner, log, drafters=drafters)
        engine.submit(request("a", "a prompt", max_tokens=300, ignore_eos=True))
        run_until_ended(engine, log, 1)
        steps[len(drafters)] = len(runner.steps)
        assert len(log.text["a"]) == 300
        texts = log.text["a"]
        runner.check()
    plain = Log()
    engine = make(FakeRunner(kv_tokens=1024, batch=64), plain)
    engine.submit(request("a", "a prompt", max_tokens=300, ignore_eos=True))
    run_until_ended(engine, plain, 1)
    assert plain.text["a"] == texts
    assert steps[1] < 0.5 * steps[0]
    (end,) = log.ends["a"]
    assert isinstance(end, Finished)
    assert 0 < end.timings.draft_n_accepted < end.timings.draft_n
    told, timings = log.stats.speculation, end.timings
    assert told.draft_tokens_total == timings.draft_n
    assert told.accepted_tokens_total == timings.draft_n_accepted
    assert told.drafting_steps_total == timings.draft_steps == steps[1] - 1
    assert told.acceptance == pytest.approx(timings.draft_n_accepted / timings.draft_n, abs=0.1)
    assert told.tokens_per_step == pytest.approx(299 / timings.draft_steps, rel=0.2)
    assert told.share == pytest.approx(1.0)
    assert (told.reason, timings.draft_reason, timings.draft_by) == ("", "", ("oracle",))
    assert log.stats.generation_tokens_total == 300


def test_tokens_computed_again_are_not_decode_steps() -> None:
    log, runner = Log(), FakeRunner(kv_tokens=1024)
    engine = make(runner, log)
    for name in "ab":
        engine.submit(request(name, name, max_tokens=120, ignore_eos=True))
    until_prepared(engine)
    for _ in range(60):
        engine.step(wait=False)
    preempted = engine._scheduler.running[-1]
    engine._scheduler._preempt(preempted)
    del runner.donors[-1][preempted.num_prompt + 2 :]  # evicted, but for a part of the answer
    run_until_ended(engine, log, 2)
    assert max(size for step in runner.steps for _, size in step) > 10, "computed in pieces"
    assert log.stats.speculation.tokens_per_step == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_leave_the_pool_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_runner, "next_token", repeating)
    always_draft(monkeypatch)
    chance = random.Random(seed)
    log, runner = Log(), FakeRunner(kv_tokens=200, max_seqs=5, batch=40)
    oracle = Oracle(seed)
    engine = make(runner, log, drafters=[NgramDrafter(), oracle])
    prompts = {str(i): "ab" * chance.randrange(1, 20) + str(i) for i in range(30)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=chance.randrange(1, 40)))
        for _ in range(chance.randrange(4)):
            engine.step(wait=False)
        if chance.random() < 0.2:
            engine.cancel(name)
    run_until_ended(engine, log, len(prompts))
    assert all(len(ends) == 1 for ends in log.ends.values())
    for name, prompt in prompts.items():
        (end,) = log.ends[name]
        assert isinstance(end, Finished), end
        whole = expected_text(prompt, len(prompt) + 40)
        assert whole.startswith(log.text[name])
        if end.reason != "cancelled":
            assert len(log.text[name]) in (end.completion_tokens, end.completion_tokens - 1)
    assert log.stats.speculation.draft_tokens_total > 100
    runner.check()
    assert not oracle.known


def test_drafters_are_closed_with_the_engine() -> None:
    oracle, log = Oracle(0), Log()
    engine = make(FakeRunner(), log, drafters=[oracle])
    engine.stop()
    engine.run()
    assert oracle.closed


def test_no_drafts_where_the_cache_cannot_be_cut_back() -> None:
    log, runner = Log(), FakeRunner(kv_tokens=1024, rewinds=False)
    engine = make(runner, log, drafters=[Oracle(0)])
    engine.submit(request("a", "a prompt", max_tokens=100, ignore_eos=True))
    run_until_ended(engine, log, 1)
    assert not isinstance(log.ends["a"][0], Failed)
    assert log.stats.speculation.reason == (
        "impossible: computed tokens cannot be removed from the KV cache "
        "(model architecture, or --no-prefix-cache)"
    )
    assert log.stats.speculation.draft_tokens_total == 0
