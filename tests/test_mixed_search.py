"""Choice of types within a size or a loss, against every combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from localgen.quant.mixed.search import (
    Mixture,
    Options,
    TypeOption,
    fit_bytes,
    fit_kl,
    largest_mixture,
    smallest_mixture,
    total_bytes,
    total_kl,
)


def random_options(seed: int, groups: int = 5, types: int = 5) -> Options:
    made = random.Random(seed)
    return {
        f"blk.{group}": [
            TypeOption(f"T{kind}", made.randrange(10, 200), made.random() ** 3)
            for kind in range(types)
        ]
        for group in range(groups)
    }


def all_mixtures(options: Options) -> Iterator[Mixture]:
    for chosen in itertools.product(*options.values()):
        yield dict(zip(options, chosen, strict=True))


def changes(options: Options, chosen: Mixture) -> Iterator[Mixture]:
    """Mixtures that differ in one group."""
    for name, choices in options.items():
        for option in choices:
            yield chosen | {name: option}


@pytest.mark.parametrize("seed", range(20))
def test_within_a_size(seed: int) -> None:
    options = random_options(seed)
    least, most = smallest_mixture(options), largest_mixture(options)
    whole = list(all_mixtures(options))
    for part in (0.0, 0.2, 0.5, 0.9, 1.0):
        budget = total_bytes(least) + int(part * (total_bytes(most) - total_bytes(least)))
        found = fit_bytes(options, budget)
        assert total_bytes(found) <= budget
        # no single change is better and fits
        for other in changes(options, found):
            assert total_bytes(other) > budget or total_kl(other) >= total_kl(found)
        best = min(total_kl(one) for one in whole if total_bytes(one) <= budget)
        # the relaxation loses less than the largest loss of one group
        assert total_kl(found) <= best + max(one.kl for one in least.values())
    assert total_kl(fit_bytes(options, 10**9)) == pytest.approx(total_kl(most))


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_the_relaxation_have_the_best_mixture(seed: int) -> None:
    """A mixture that minimizes loss + price x bytes is the best of its size."""
    options = random_options(seed)
    whole = list(all_mixtures(options))
    for price in (1e-4, 1e-3, 1e-2):
        best = {
            name: min(choices, key=lambda one: one.kl + price * one.num_bytes)
            for name, choices in options.items()
        }
        found = fit_bytes(options, total_bytes(best))
        assert total_kl(found) == pytest.approx(total_kl(best))
        assert total_kl(found) == pytest.approx(
            min(total_kl(one) for one in whole if total_bytes(one) <= total_bytes(best))
        )


@pytest.mark.parametrize("seed", range(20))
def test_within_a_loss(seed: int) -> None:
    options = random_options(seed)
    least = total_kl(largest_mixture(options))
    for limit in (least, least + 0.01, least + 0.3, 10.0):
        found = fit_kl(options, limit)
        assert total_kl(found) <= limit + 1e-12
        for other in changes(options, found):
            assert total_kl(other) > limit or total_bytes(other) >= total_bytes(found)
    assert total_bytes(fit_kl(options, 10.0)) == total_bytes(smallest_mixture(options))
    # a loss that no mixture reaches
    assert total_kl(fit_kl(options, least / 2)) == pytest.approx(least)
