"""benchmarks.quality runs; its share of recovered loss and its windows are as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.measure import ModelLine, Report
from benchmarks.quality import WINDOW, Loss, enter, main, windows


def checks(**perplexities: float) -> dict[str, tuple[float, bool]]:
    report = Report(ModelLine("tiny", 1, 1), 1, True, 1, {})
    losses = {name.replace("_", "-"): Loss(value, (0.0,)) for name, value in perplexities.items()}
    enter(report, losses)
    return {check.name: (check.value, check.met) for check in report.checks}


def test_recovered_loss_is_a_share_of_the_rounding_loss() -> None:
    found = checks(original=15.0, rtn_4=15.4, gptq_4=15.1, awq_4=15.3, fp8=15.09)
    wanted = {
        "perplexity: rtn-4": (15.4, True),
        "perplexity: gptq-4": (15.1, True),
        "perplexity: awq-4": (15.3, True),
        "recovered of rtn's loss: gptq-4": (0.75, False),
        "recovered of rtn's loss: awq-4": (0.25, False),
        "perplexity: fp8 ÷ original": (1.006, False),
    }
    assert {name: met for name, (_, met) in found.items()} == {
        n: met for n, (_, met) in wanted.items()
    }
    assert {n: round(value, 9) for n, (value, _) in found.items()} == {
        n: v for n, (v, _) in wanted.items()
    }


def test_windows_overlap_by_the_token_that_follows() -> None:
    found = windows(list(range(4 * WINDOW)))
    assert found.shape[1] == WINDOW + 1
    assert torch.equal(found[1:, 0], found[:-1, -1])


def test_quality_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "quality.json"
    assert main(["--only", "rtn-8", "--output", str(target)]) == 0
    assert "| rtn-8 " in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert [check["met"] for check in written["checks"]] == [True]
