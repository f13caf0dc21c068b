"""The types of all groups with the least loss within a size, or the least size within a loss.

Every group has options of a size and a loss. The Lagrangian relaxation of this knapsack problem has
a solution for each price of a byte: every group takes the option with the least loss + price x
bytes, which lies on the lower convex hull of its options. Lowering the price passes the segments of
all hulls, steepest first, so sorting the segments finds the solution of every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TypeOption:
    """A type for a group. kl: predicted loss of the model, in nats."""

    type_name: str
    num_bytes: int
    kl: float


Options = Mapping[str, Sequence[TypeOption]]
# option of each group, by its name
Mixture = dict[str, TypeOption]


def total_bytes(mixture: Mixture) -> int:
    return sum(one.num_bytes for one in mixture.values())


def total_kl(mixture: Mixture) -> float:
    return sum(one.kl for one in mixture.values())


def smallest_mixture(options: Options) -> Mixture:
    return {name: min(one, key=lambda o: (o.num_bytes, o.kl)) for name, one in options.items()}


def largest_mixture(options: Options) -> Mixture:
    return {name: min(one, key=lambda o: (o.kl, o.num_bytes)) for name, one in options.items()}


def fit_bytes(options: Options, max_bytes: int) -> Mixture:
    """Mixture of the least loss whose size is max_bytes or less; what the relaxation leaves of the
    size is filled with the best upgrades that fit. max_bytes: that of smallest_mixture at least."""
    chosen = smallest_mixture(options)
    left = max_bytes - total_bytes(chosen)
    assert left >= 0, (max_bytes, total_bytes(chosen))
    for name, option in _hull_steps(options):
        step = option.num_bytes - chosen[name].num_bytes
        if step > left:
            break
        chosen[name], left = option, left - step
    while (upgrade := _best_upgrade(options, chosen, left)) is not None:
        name, option = upgrade
        left -= option.num_bytes - chosen[name].num_bytes
        chosen[name] = option
    return chosen


def fit_kl(options: Options, max_kl: float) -> Mixture:
    """Mixture of the least size whose loss is max_kl or less; largest_mixture if none is."""
    chosen = smallest_mixture(options)
    for name, option in _hull_steps(options):
        if total_kl(chosen) <= max_kl:
            break
        chosen[name] = option
    while (saving := _best_saving(options, chosen, max_kl - total_kl(chosen))) is not None:
        name, option = saving
        chosen[name] = option
    return chosen


def _hull_steps(options: Options) -> Iterator[tuple[str, TypeOption]]:
    """Steps along the lower convex hulls from the smallest options, by loss saved per byte."""
    steps = []
    for name, choices in options.items():
        hull = _lower_hull(choices)
        for before, after in itertools.pairwise(hull):
            gain = (before.kl - after.kl) / (after.num_bytes - before.num_bytes)
            steps.append((-gain, after.num_bytes, name, after))
    # a hull's own steps have falling gains, so they stay in order
    for _, _, name, option in sorted(steps, key=lambda step: step[:3]):
        yield name, option


def _lower_hull(choices: Sequence[TypeOption]) -> list[TypeOption]:
    """Options on the lower convex hull of loss over size, from the smallest to the least loss."""
    hull: list[TypeOption] = []
    for option in sorted(choices, key=lambda one: (one.num_bytes, one.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _is_above(first: TypeOption, middle: TypeOption, last: TypeOption) -> bool:
    """The middle option lies on or above the line between the others."""
    along = (middle.num_bytes - first.num_bytes) * (last.kl - first.kl)
    return (middle.kl - first.kl) * (last.num_bytes - first.num_bytes) >= along


def _best_upgrade(
    options: Options, chosen: Mixture, max_step: int
) -> tuple[str, TypeOption] | None:
    """The change that saves the most loss and takes no more than max_step bytes."""
    changes = [
        (chosen[name].kl - option.kl, name, option)
        for name, choices in options.items()
        for option in choices
        if option.kl < chosen[name].kl and option.num_bytes - chosen[name].num_bytes <= max_step
    ]
    best = max(changes, key=lambda change: change[:2], default=None)
    return best and best[1:]


def _best_saving(
    options: Options, chosen: Mixture, max_loss: float
) -> tuple[str, TypeOption] | None:
    """The change that saves the most bytes and adds no more than max_loss."""
    changes = [
        (chosen[name].num_bytes - option.num_bytes, name, option)
        for name, choices in options.items()
        for option in choices
        if option.num_bytes < chosen[name].num_bytes and option.kl - chosen[name].kl <= max_loss
    ]
    best = max(changes, key=lambda change: change[:2], default=None)
    return best and best[1:]
