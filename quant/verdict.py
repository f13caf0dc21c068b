"""The verdict on evaluated models: losses with intervals, and which differences can be told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from localgen.quant.evaluate import EvalMetrics
from localgen.quant.intervals import PairedBootstrap
from localgen.quant.request.events import EvalEvent, EvalRow
from localgen.quant.request.losses import DomainLoss, Interval, KlDifference


def summarize(
    rows: Sequence[EvalRow], metrics: Mapping[str, EvalMetrics], domains: Sequence[str]
) -> EvalEvent:
    """Rows with their losses. metrics: by the row's path. domains: of each window, or empty.

    The first of metrics is the original that the others are compared with.
    """
    original = next(iter(metrics.values()))
    bootstrap = PairedBootstrap(domains, len(original.window_nll))
    found = [_with_losses(row, metrics[row.path], original, domains, bootstrap) for row in rows]
    return EvalEvent(
        tuple(found), len(original.window_nll), tuple(_differences(rows, metrics, bootstrap))
    )


def _with_losses(
    row: EvalRow,
    metrics: EvalMetrics,
    original: EvalMetrics,
    domains: Sequence[str],
    bootstrap: PairedBootstrap,
) -> EvalRow:
    return replace(
        row,
        perplexity=metrics.perplexity,
        kl=metrics.kl,
        kl_interval=_kl_interval(metrics, bootstrap),
        perplexity_change=_perplexity_change(metrics, original, bootstrap),
        domains=tuple(_domain_losses(metrics, original, domains)),
    )


def _domain_losses(
    metrics: EvalMetrics, original: EvalMetrics, domains: Sequence[str]
) -> Sequence[DomainLoss]:
    if len(domains) != len(metrics.window_nll):
        return ()  # a tokenizer of its own cuts the text into other windows
    labels = np.array(domains)
    found = []
    for domain in dict.fromkeys(domains):
        part = _windows(metrics, labels == domain)
        bootstrap = PairedBootstrap((), len(part.window_nll))
        found.append(
            DomainLoss(
                domain,
                len(part.window_nll),
                part.perplexity,
                part.kl,
                _kl_interval(part, bootstrap),
                _perplexity_change(part, _windows(original, labels == domain), bootstrap),
            )
        )
    return found


def _windows(metrics: EvalMetrics, chosen: NDArray[np.bool_]) -> EvalMetrics:
    kl = metrics.window_kl
    return EvalMetrics(metrics.window_nll[chosen], None if kl is None else kl[chosen])


def _kl_interval(metrics: EvalMetrics, bootstrap: PairedBootstrap) -> Interval | None:
    return None if metrics.window_kl is None else bootstrap.interval(metrics.window_kl)


def _perplexity_change(
    metrics: EvalMetrics, original: EvalMetrics, bootstrap: PairedBootstrap
) -> Interval | None:
    if metrics.window_kl is None:
        return None
    found = bootstrap.interval(metrics.window_nll - original.window_nll)
    return found and Interval(math.expm1(found.low), math.expm1(found.high))


def _differences(
    rows: Sequence[EvalRow], metrics: Mapping[str, EvalMetrics], bootstrap: PairedBootstrap
) -> Sequence[KlDifference]:
    """Of each pair with a KL, the smaller first."""
    known = [(kl, row.name) for row in rows if (kl := metrics[row.path].window_kl) is not None]
    known.sort(key=lambda one: float(one[0].mean()))
    return [
        KlDifference(
            first, second, float((worse - better).mean()), bootstrap.interval(worse - better)
        )
        for (better, first), (worse, second) in combinations(known, 2)
    ]
