"""The benchmark of drafts: its arithmetic, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drafting import RIGHT, WRONG, Guesser, decoding

from benchmarks import replay, speculation, step_curve
from benchmarks.scripted import Counted, Insisting, acceptance

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
    counted.chances(seq, 4)
    counted.propose([(seq, 4)])
    counted.learn(seq, [RIGHT, RIGHT, WRONG])
    assert (counted.right, counted.wrong) == (2, 1)
    counted.propose([(seq, 2)])
    counted.learn(seq, [RIGHT, RIGHT, RIGHT])
    assert (counted.right, counted.wrong) == (4, 1)
    assert counted.lengths == [4, 2]
    assert acceptance([counted]) == 0.8
    assert acceptance([counted, Counted(guesser)]) == 0.8
    assert acceptance([]) == 0.0


def test_drafts_that_are_made_whatever_is_expected() -> None:
    seq = decoding()
    insisting = Insisting(Guesser(0.0, ms=5.0), 3)
    assert insisting.chances(seq, 8) == [1.0] * 3
    assert insisting.chances(seq, 2) == [1.0] * 2
    assert insisting.draft_ms(1) == 0.0
    assert insisting.usual_chance() == 0.0, "there is nothing to be read"
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
