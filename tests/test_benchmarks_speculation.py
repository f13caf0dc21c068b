"""The benchmark of drafts: its arithmetic, and that it runs."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import cast

import pytest
from drafting import RIGHT, WRONG, Guesser, decoding
from fake_runner import FakeRunner

from benchmarks import in_turn, replay, speculation, step_curve
from benchmarks.answers import Answer
from benchmarks.scripted import Counted, Insisting, acceptance
from benchmarks.session import GREEDY, OwnTime, Session
from localgen.backends.runner.interface import Chunk
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Finished, Timings

FLAT = dict.fromkeys(range(1, 65), 10.0)
STEEP = {size: 10.0 * size for size in range(1, 65)}


def test_the_curve_is_a_line_between_what_was_measured() -> None:
    curve = {1: 10.0, 4: 40.0, 8: 50.0}
    assert [step_curve.step_ms(curve, n) for n in (1, 2, 4, 6, 8, 9)] == [10, 20, 40, 45, 50, 50]


@pytest.mark.parametrize(
    ("curve", "alpha", "draft_ms", "drafts", "gain"),
    [
        (FLAT, 1.0, 0.0, 63, 64.0),
        (FLAT, 0.0, 0.0, 0, 1.0),
        (STEEP, 0.9, 0.0, 0, 1.0),
        (FLAT, 0.8, 10.0, 0, 1.0),
        ({1: 10.0, 5: 10.0, 6: 1000.0}, 0.8, 0.0, 4, 3.3616),
    ],
)
def test_the_best_number_of_drafts(
    curve: step_curve.Curve, alpha: float, draft_ms: float, drafts: int, gain: float
) -> None:
    assert step_curve.best(curve, alpha, draft_ms) == pytest.approx((drafts, gain))


def test_drafts_are_counted_up_to_the_first_wrong_one() -> None:
    guesser = Guesser(1.0)
    counted = Counted(guesser)
    seq = decoding()
    counted.acceptance_probs(seq, 4)
    counted.propose([(seq, 4)])
    counted.observe(seq, [RIGHT, RIGHT, WRONG])
    assert (counted.right, counted.wrong) == (2, 1)
    counted.propose([(seq, 2)])
    counted.observe(seq, [RIGHT, RIGHT, RIGHT])
    assert (counted.right, counted.wrong) == (4, 1)
    assert counted.lengths == [4, 2]
    assert acceptance([counted]) == 0.8
    assert acceptance([counted, Counted(guesser)]) == 0.8
    assert acceptance([]) == 0.0


class Paced:
    """A session, and its clock: an answer of so many tokens, each of which takes so long."""

    def __init__(self, name: str, step_s: float, order: list[str]) -> None:
        self._name, self._step_s, self._order = name, step_s, order
        self.now_s, self.answer = 0.0, Answer(sent_s=0.0)
        self._left = 0

    def submit(self, prompt: list[int], tokens: int, params: SamplingParams) -> Answer:
        self._left = tokens
        return self.answer

    def step(self) -> None:
        self._order.append(self._name)
        self.now_s += self._step_s
        self._left -= 1
        self.answer.arrivals.append((self.now_s, len(self.answer.arrivals) + 1))
        if not self._left:
            self.answer.end = Finished(
                request_id="",
                reason="length",
                timings=Timings(),
                prompt_tokens=1,
                completion_tokens=len(self.answer.arrivals),
                ctx=512,
            )

    def __call__(self) -> float:
        return self.now_s

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None: ...


def test_sides_take_turns_of_ten_milliseconds_and_of_a_step_at_least() -> None:
    order: list[str] = []
    paced = [Paced("short", 0.004, order), Paced("long", 0.030, order)]
    sides = [in_turn.Side(cast(Session, one), cast(OwnTime, one)) for one in paced]
    in_turn.ask(sides, [[1]], 6, GREEDY, random.Random(1))
    turns = [(name, len(list(steps))) for name, steps in itertools.groupby(order)]
    assert [count for name, count in turns if name == "short"] == [3, 3]
    for at, name in enumerate(order):
        # whoever has said least goes on
        assert name == "short" or order[:at].count("long") <= order[:at].count("short")
    assert order.count("long") == 6


class Slow(FakeRunner):
    """A runner whose steps take a while, and that says in which order they came."""

    def __init__(self, name: str, order: list[tuple[str, int]]) -> None:
        super().__init__(kv_tokens=512, batch=512)
        self._name, self._order = name, order

    def launch(self, chunks: Seq[Chunk]) -> list[Chunk]:
        self._order.append((self._name, sum(map(len, chunks))))
        time.sleep(0.0005)
        return super().launch(chunks)


def test_prices_are_of_steps_in_a_row_behind_those_of_the_draft_model() -> None:
    order: list[tuple[str, int]] = []
    target, draft = (Slow(name, order) for name in ("target", "draft"))
    found = step_curve.measure(target, 100, context=8, rounds=1, draft=draft)
    assert set(found.steps) == set(step_curve.SIZES)
    assert all(len(found.steps[size]) >= (3 if size <= 8 else 1) for size in step_curve.SIZES)
    assert len(found.steps[1]) > 3, "as many as fit into ten milliseconds"
    steps = order[2:]  # both read their text first
    before = 0
    for name, tokens in steps:
        if name == "draft":
            assert tokens == 1
            before += 1
        else:
            assert before == min(tokens - 1, 8)
            before = 0
    sizes = [size for size, _ in itertools.groupby(n for name, n in steps if name == "target")]
    assert len(sizes) == 2 * len(step_curve.SIZES) - 1, "one round warms up, up and down again"


def test_drafts_that_are_made_whatever_is_expected() -> None:
    seq = decoding()
    insisting = Insisting(Guesser(0.0, ms=5.0), 3)
    assert insisting.acceptance_probs(seq, 8) == [1.0] * 3
    assert insisting.acceptance_probs(seq, 2) == [1.0] * 2
    assert insisting.draft_ms() == 0.0
    assert insisting.prefill_acceptance() == 0.0, "there is nothing to be read"
    (found,) = insisting.propose([(seq, 3)])
    assert found.tokens == [WRONG] * 3


def test_what_a_copy_could_gain() -> None:
    prompt, answer = replay.copies(40, 2048, edited=0.0, seed=1)
    assert answer == prompt
    drafts, gain = replay.best(FLAT, [(prompt, answer)])
    # two tokens are plain: what comes then is found in the prompt
    assert (drafts, gain) == (37, 39 / 2)
    assert replay.best(STEEP, [(prompt, answer)]) == (0, 1.0)
    # at the end no more than are left: of 39 tokens one is plain, then come 32 and 6
    some = dict.fromkeys((1, 2, 4, 32), 10.0)
    assert replay.best(some, [(prompt, answer)]) == (31, 39 / 3)
    prompt, edited = replay.copies(400, 2048, edited=0.1, seed=1)
    assert replay.best(FLAT, [(prompt, edited)])[1] < 10
    assert len(edited) == 400


def test_prose_hardly_repeats_itself() -> None:
    ((prompt, answer),) = replay.natural(64, 100, 1, vocab=10_000)
    assert (len(prompt), len(answer)) == (64, 100)
    assert replay.best(STEEP, [(prompt, answer)])[0] == 0


@pytest.mark.parametrize(("backend", "checks"), [("llamacpp", 11), ("cuda", 16)])
def test_it_runs(
    backend: str,
    checks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tmp_path / "found.json"
    asked = ["--quick", "--threads", "2", "--backend", backend, "--output", str(found)]
    assert speculation.main(asked) == 0
    whole = json.loads(found.read_text())
    assert len(whole["checks"]) == checks
    same = {s["test"]: s["median"] for s in whole["series"] if s["side"] == "same text"}
    assert len(same) == 12
    a_step = {s["test"] for s in whole["series"] if s["side"] == "tokens a step"}
    expected = {s["test"]: s["median"] for s in whole["series"] if "expected" in s["side"]}
    assert expected.keys() == a_step
    assert min(expected.values()) >= 1
    assert any(s["side"] == "plain again ÷ plain" for s in whole["series"])
    # a flat distribution is drawn from otherwise as soon as anything is rounded otherwise
    assert min(share for test, share in same.items() if "not repeat" not in test) >= 0.9
    assert "reached of it" in capsys.readouterr().out
