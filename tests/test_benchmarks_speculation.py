"""The benchmark of drafts: its arithmetic, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drafting import RIGHT, WRONG, Guesser, decoding

from benchmarks import speculation, step_curve
from benchmarks.scripted import Counted

FLAT = {1: 10.0, 2: 10.0, 64: 10.0}
STEEP = {1: 10.0, 2: 20.0, 64: 640.0}


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
    assert counted.acceptance == 0.8


@pytest.mark.parametrize("backend", ["llamacpp", "cuda"])
def test_it_runs(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tmp_path / "found.json"
    asked = ["--quick", "--threads", "2", "--backend", backend, "--output", str(found)]
    assert speculation.main(asked) == 0
    whole = json.loads(found.read_text())
    assert len(whole["checks"]) == 8
    same = {s["test"]: s["median"] for s in whole["series"] if s["side"] == "same text"}
    assert len(same) == 8
    # a flat distribution is drawn from otherwise as soon as anything is rounded otherwise
    assert min(share for test, share in same.items() if "not repeat" not in test) >= 0.9
    assert "reached of it" in capsys.readouterr().out
