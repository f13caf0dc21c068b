"""Intervals hold what they promise; the verdict tells differences from noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import numpy as np
from numpy.typing import NDArray

from localgen.quant.evaluate import EvalMetrics
from localgen.quant.intervals import MIN_WINDOWS, PairedBootstrap
from localgen.quant.report import domain_table, verdict_lines, verdict_markdown
from localgen.quant.request.events import EvalEvent, EvalRow
from localgen.quant.verdict import summarize

DOMAINS = ("prose",) * 12 + ("code",) * 12 + ("chat",) * 12
Values = NDArray[np.float64]


def skewed(generator: np.random.Generator) -> Values:
    """Log-normal values of three domains with different means, as KL by window is."""
    means = np.repeat([0.5, 1.0, 2.0], 12)
    return np.asarray(means * generator.lognormal(0.0, 0.4, len(DOMAINS)), np.float64)


def test_intervals_contain_the_mean_as_often_as_they_promise() -> None:
    bootstrap = PairedBootstrap(DOMAINS, len(DOMAINS))
    truth = np.exp(0.4**2 / 2) * np.mean([0.5, 1.0, 2.0])
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(300):
        found = bootstrap.interval(skewed(generator))
        assert found is not None
        held += found.low <= truth <= found.high
    # 95 % of 300 is 285; the percentile method is a little narrow for skewed values
    assert 270 <= held <= 297


def test_domains_of_different_means_widen_nothing() -> None:
    values = skewed(np.random.default_rng(1))
    apart = PairedBootstrap(DOMAINS, len(values)).interval(values)
    mixed = PairedBootstrap((), len(values)).interval(values)
    assert apart is not None
    assert mixed is not None
    assert apart.high - apart.low < 0.8 * (mixed.high - mixed.low)


def test_paired_draws_cancel_what_windows_have_in_common() -> None:
    values = skewed(np.random.default_rng(2))
    bootstrap = PairedBootstrap(DOMAINS, len(values))
    found = bootstrap.interval((values + 0.01) - values)
    assert found is not None
    assert found.low == pytest.approx(0.01)
    assert found.high == pytest.approx(0.01)
    assert bootstrap.interval(values) == bootstrap.interval(values)


def test_too_few_windows_have_no_interval() -> None:
    few = np.ones(MIN_WINDOWS - 1)
    assert PairedBootstrap((), len(few)).interval(few) is None
    alone = np.ones(9)
    assert PairedBootstrap(("a",) * 8 + ("b",), 9).interval(alone) is None
    assert PairedBootstrap(("a",) * 5 + ("b",) * 4, 9).interval(alone) is not None


@pytest.fixture(scope="module")
def verdict() -> EvalEvent:
    """An original, a result, one that is equal but for noise, and one that is worse."""
    generator = np.random.default_rng(3)
    nll = 2 + skewed(generator)
    kl = 0.01 * skewed(generator)
    noise = 0.0005 * generator.normal(size=len(nll))
    metrics = {
        "/o": EvalMetrics(nll),
        "/bad": EvalMetrics(nll + 0.05 + noise, kl + 0.004),
        "/a": EvalMetrics(nll + noise - noise.mean(), kl),
        "/b": EvalMetrics(nll + noise, kl + noise - noise.mean()),
    }
    rows = [EvalRow(path[1:], path, 1, 4.0) for path in metrics]
    return summarize(rows, metrics, DOMAINS)


def test_differences_that_can_be_told(verdict: EvalEvent) -> None:
    told = {
        (one.first, one.second): one.interval is not None and one.interval.excludes_zero
        for one in verdict.differences
    }
    assert {frozenset(pair): value for pair, value in told.items()} == {
        frozenset("ab"): False,
        frozenset(("a", "bad")): True,
        frozenset(("b", "bad")): True,
    }
    lines = verdict_lines(verdict)
    assert lines[0] == "Intervals are of 95 %, from 36 sequences; KL in nats per token."
    assert "bad is worse than a: KL +0.0040 to +0.0040" in lines
    assert any(line.endswith("cannot be told apart from the original's") for line in lines)
    assert any("cannot be told apart: KL -" in line for line in lines)


def test_losses_by_domain(verdict: EvalEvent) -> None:
    original, bad = verdict.rows[:2]
    assert [one.windows for one in bad.domains] == [12, 12, 12]
    mean = np.mean([one.kl for one in bad.domains if one.kl is not None])
    assert mean == pytest.approx(bad.kl)
    assert original.domains[0].kl is None
    assert [row[1] for row in domain_table(verdict.rows)[1:4]] == ["prose", "code", "chat"]
    assert domain_table([replace(row, domains=()) for row in verdict.rows]) == []


def test_the_model_card_has_all_of_it(verdict: EvalEvent) -> None:
    text = "\n".join(verdict_markdown(verdict))
    assert text.startswith("| model | size | bits/weight | kl | perplexity |\n| --- |")
    assert "| model | domain | sequences | kl | perplexity |" in text
    assert "\n- Intervals are of 95 %" in text
