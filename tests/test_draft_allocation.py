"""The allocation of drafts: that of a plain greedy search, without a matrix per draft."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from drafting import Guesser
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.engine.speculation.allocation import DraftOption, allocate

PROBS = st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), max_size=6)


def fastest(
    options: Seq[DraftOption | None], step_ms: Callable[[int], float], most: int, slowdown: float
) -> float:
    """The speedup of the fastest allocation, by giving one draft at a time; 0: there is none."""
    count, best = len(options), 0.0
    drafts, reached, expected = [0] * count, [1.0] * count, [1.0] * count
    for total in range(1, most + 1):
        gains = {
            row: reached[row] * option.probs[drafts[row]] / expected[row]
            for row, option in enumerate(options)
            if option and drafts[row] < len(option.probs)
        }
        row = max(gains, key=lambda each: gains[each], default=0)
        option = options[row]
        if option is None or not gains.get(row):
            break
        reached[row] *= option.probs[drafts[row]]
        expected[row] += reached[row]
        drafts[row] += 1
        rounds: dict[Guesser, int] = {}
        for each, given_ in zip(options, drafts, strict=True):
            if each and isinstance(each.drafter, Guesser):
                rounds[each.drafter] = max(given_, rounds.get(each.drafter, 0))
        ms = step_ms(count + total) + sum(n * drafter.ms for drafter, n in rounds.items())
        if min(expected) * step_ms(count) * slowdown >= ms:
            best = max(best, sum(expected) / count * step_ms(count) / ms)
    return best


@given(
    st.lists(st.none() | st.tuples(st.integers(0, 1), PROBS), min_size=1, max_size=6),
    st.sampled_from([0, 1, 3, 64]),
    st.sampled_from([(4.0, 0.02), (22.0, 7.5), (0.0, 10.0), (1, 0)]),
    st.sampled_from([1.05, 1.5, float("inf")]),
)
def test_the_fastest_of_a_greedy_search(
    rows: list[tuple[int, list[float]] | None],
    most: int,
    cost: tuple[float, float],
    slowdown: float,
) -> None:
    def step_ms(tokens: int) -> float:
        return cost[0] + cost[1] * tokens

    drafters = Guesser(0.5), Guesser(0.5, ms=1.5)
    options = [DraftOption(drafters[row[0]], row[1]) if row else None for row in rows]
    found = allocate(options, step_ms, max_drafts=most, max_slowdown=slowdown)
    assert found.speedup == pytest.approx(fastest(options, step_ms, most, slowdown))
    assert sum(found.drafts) <= most
    for option, count in zip(options, found.drafts, strict=True):
        assert count <= (len(option.probs) if option else 0)


def test_memory_does_not_grow_with_sequences_times_drafts_of_the_step() -> None:
    options = [DraftOption(Guesser(0.5), [0.8] * 63) for _ in range(256)]
    tracemalloc.start()
    allocate(options, lambda tokens: 4.0 + 0.02 * tokens, max_drafts=4096)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 * 256 * 4096, "less than one matrix of these"
