"""benchmarks.quality and benchmarks.constants run; their comparisons are of the same windows."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import constants, quality
from benchmarks.evaluated_model import TextSizes
from benchmarks.gptaq import Gptaq
from benchmarks.measure import ModelLine, Report
from benchmarks.quality import Losses, enter
from localgen.quant.evaluate import EvalMetrics
from localgen.quant.files.packing import GroupedWeight
from localgen.quant.methods import grid
from localgen.quant.methods.gptq import factor_hessian, gptq_grid, round_gptq
from localgen.quant.methods.grid import QuantGrid
from localgen.quant.request.recipe import Recipe

DOMAINS = ("prose",) * 6 + ("code",) * 6


def losses(**shifts: float) -> Losses:
    """Recipes by name, whose KL is that of others plus a shift."""
    generator = np.random.default_rng(0)
    nll, kl = 3 + generator.random(12), 0.1 + 0.1 * generator.random(12)
    found = Losses(EvalMetrics(nll), DOMAINS)
    for name, shift in shifts.items():
        noise = 1e-3 * generator.normal(size=12)
        found.found[name.replace("_", "-")] = EvalMetrics(nll + shift, kl + shift + noise)
    return found


def test_targets_are_met_by_differences_that_can_be_told() -> None:
    report = Report(ModelLine("tiny", 1, 1), 1, True, 1, {})
    enter(report, losses(rtn_4=0.0, gptq_4=-0.05, awq_4=0.0, rtn_8=0.004, fp8=0.006))
    assert {check.name: check.met for check in report.checks} == {
        "KL minus that of rtn-4, upper bound: gptq-4": True,
        "KL minus that of rtn-4, upper bound: awq-4": False,
        "perplexity: rtn-8 ÷ original": True,
        "perplexity: fp8 ÷ original": False,
    }
    figures = {(one.test, one.side): one.values for one in report.series}
    mean, low, high = figures["KL minus that of rtn-4", "gptq-4"]
    assert low < mean < high
    assert mean == pytest.approx(-50, abs=2)
    by_domain = [figures[f"KL divergence, {one}", "fp8"][0] for one in ("prose", "code")]
    assert np.mean(by_domain) == pytest.approx(figures["KL divergence", "fp8"][0])


def test_quality_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "quality.json"
    arguments = ["--only", "rtn-8", "--windows", "9", "--output", str(target)]
    assert quality.main(arguments) == 0
    assert "| rtn-8 " in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert [check["met"] for check in written["checks"]] == [True]


def test_a_variant_changes_one_constant_and_restores_it() -> None:
    before = grid._WEIGHT_SHRINKS
    variant = constants.VARIANTS["gptq"]["range down to 0.7"]
    with variant.applied(Recipe(method="gptq")) as recipe:
        assert recipe == Recipe(method="gptq")
        assert pytest.approx(0.7) == grid._WEIGHT_SHRINKS[-1]
    assert before == grid._WEIGHT_SHRINKS
    with constants.VARIANTS["gptq"]["damping 0.1"].applied(Recipe(method="gptq")) as recipe:
        assert recipe.damping == 0.1


def test_every_variant_differs_from_its_default() -> None:
    for key, name, recipe in constants.measured("awq-4,gptq-3", None):
        if name == constants.DEFAULT:
            continue
        variant = constants.VARIANTS[recipe.method][name]
        current = {one: getattr(variant.module, one) for one in variant.constants}
        changed = [one for one, value in variant.fields.items() if getattr(recipe, one) != value]
        assert current != variant.constants or changed, (key, name)
        assert variant.constants or changed == list(variant.fields), (key, name)


def test_variants_are_chosen_by_the_beginnings_of_their_names() -> None:
    found = [name for _, name, _ in constants.measured("gptq-2", "GPTAQ,damping 0.1")]
    assert found == [constants.DEFAULT, "damping 0.1", "GPTAQ 0.25", "GPTAQ 0.5", "GPTAQ 1"]


def test_gptaq_corrects_each_input_in_those_that_follow() -> None:
    torch.manual_seed(1)
    weight, inputs = torch.randn(4, 16), torch.randn(64, 16)
    factor = factor_hessian(inputs.T @ inputs, damping=0.01, desc_act=True, name="a linear")
    mismatch = 0.1 * torch.randn(16, 64) @ inputs
    order, upper, other = factor.column_order, factor.inverse_upper, Gptaq()
    grid_of_groups = gptq_grid(weight, Recipe(method="gptq", group_size=8))
    fine = QuantGrid(torch.full((4, 1, 1), 1e-6), torch.full((4, 1, 1), 2.0**23), 24)
    assert other.correct_inputs(weight, mismatch, factor, 0.25) is weight
    led_on = (mismatch[order][:, order] @ upper.T).triu(1) @ upper
    expected = torch.linalg.solve(torch.eye(16) - 0.25 * led_on.T, weight[:, order].T).T
    seen: list[Tensor] = []
    rounded = other.round_gptq(weight, grid_of_groups, factor)

    def keep(_: QuantGrid, groups: Tensor) -> GroupedWeight:
        seen.append(groups)
        return rounded

    with mock.patch.object(QuantGrid, "round", keep):
        other.round_gptq(weight, fine, factor)
    found = seen[0].flatten(1)
    assert torch.allclose(found[:, order], expected, atol=1e-4)
    assert not torch.allclose(found, weight, atol=1e-2)
    other.correct_inputs(weight, mismatch, factor, 0.0)
    alike = other.round_gptq(weight, grid_of_groups, factor).codes
    assert torch.equal(alike, round_gptq(weight, grid_of_groups, factor).codes)


def test_constants_are_compared_on_another_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "range in steps of 1/40"
    monkeypatch.setattr(constants, "SIZES", {"tiny": TextSizes(1, 2)})
    text = Path(constants.__file__).parent / "data" / "choosing.txt"
    target = tmp_path / "constants.json"
    arguments = [
        "--only",
        "gptq-4",
        "--variants",
        name,
        "--text",
        str(text),
        "--output",
        str(target),
    ]
    assert constants.main(arguments) == 0
    assert f"| gptq-4 | {name} " in capsys.readouterr().out
    assert "choosing.txt" in target.read_text()
