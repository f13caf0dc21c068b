"""N-gram drafts: which tokens are proposed, and their estimated acceptance."""

from __future__ import annotations

import random

import pytest
from drafting import decoding
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.runner.sequence import Sequence


def drafts(tokens: list[int], count: int) -> list[int]:
    drafter, seq = NgramDrafter(), decoding()
    seq.tokens = list(tokens)
    can_draft = bool(drafter.acceptance_probs(seq, count))
    found = drafter.propose({seq: count}, 0)
    assert can_draft == (seq in found)
    return found[seq].tokens if can_draft else []


def go_on(drafter: NgramDrafter, seq: Sequence, tokens: list[int]) -> None:
    """As the engine does: ask for acceptance, then observe the tokens."""
    drafter.acceptance_probs(seq, 8)
    seq.tokens += tokens
    drafter.observe(seq, tokens)


def test_tokens_after_the_last_match_are_proposed() -> None:
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_the_longest_match_wins() -> None:
    # 7 8 is followed by 1, 6 7 8 by 2, and later 7 8 by 3
    assert drafts([6, 7, 8, 2, 5, 7, 8, 3, 4, 6, 7, 8], 1) == [2]


def test_the_latest_of_equal_matches_wins() -> None:
    assert drafts([7, 8, 1, 5, 7, 8, 2, 4, 7, 8], 1) == [2]


def test_repetition_is_continued() -> None:
    assert drafts([5, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafts([4, 4, 4], 3) == [4, 4, 4]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 2, 1], [1, 2, 3, 4, 2]])
def test_no_match_gives_no_drafts(tokens: list[int]) -> None:
    assert drafts(tokens, 4) == []


@given(st.lists(st.integers(0, 3), min_size=3, max_size=60), st.integers(1, 20))
def test_drafts_follow_an_earlier_match(tokens: list[int], count: int) -> None:
    found = drafts(tokens, count)
    pairs = [tuple(tokens[i : i + 2]) for i in range(len(tokens) - 2)]
    assert bool(found) == (tuple(tokens[-2:]) in pairs)
    if found:
        assert len(found) == count
        text = [*tokens, *found]
        # all of it follows an earlier match at one and the same distance
        assert any(
            text[len(tokens) - 2 :] == text[len(tokens) - 2 - back : len(text) - back]
            for back in range(1, len(tokens) - 1)
        )


def test_chances_grow_with_the_match() -> None:
    drafter, seq = NgramDrafter(), decoding()
    seq.tokens = [*range(40), *range(3)]
    chances = drafter.acceptance_probs(seq, 32)
    assert len(chances) == 32
    assert list(chances) == sorted(chances)
    assert chances[0] < 0.3 < 0.8 < chances[-1]
    assert [len(drafter.acceptance_probs(seq, most)) for most in (-5, 0, 1, 40)] == [0, 0, 1, 40]


def test_acceptance_is_learned_from_tokens_without_drafts() -> None:
    drafter, seq, chance = NgramDrafter(), decoding(), random.Random(3)
    seq.tokens = [1, 2]
    for _ in range(400):  # pairs recur all the time, by chance alone
        go_on(drafter, seq, [chance.randrange(6)])
    assert max(drafter.acceptance_probs(seq, 1), default=0.0) < 0.35
    copied = decoding("copied")
    copied.tokens = [*range(1000, 1200)]
    for token in range(1000, 1100):
        go_on(drafter, copied, [token])
    assert drafter.acceptance_probs(copied, 8)[-1] > 0.95


def test_several_tokens_are_learned_as_if_one_by_one() -> None:
    text = [random.Random(5).randrange(4) for _ in range(200)]
    chances = []
    for size in (1, 7):
        drafter, seq = NgramDrafter(), decoding()
        seq.tokens = text[:20]
        drafter.acceptance_probs(seq, 1)
        for at in range(20, 195, size):
            new = text[at : min(at + size, 195)]
            seq.tokens += new
            drafter.observe(seq, new)
        chances.append(list(drafter.acceptance_probs(seq, 16)))
    assert chances[0] == pytest.approx(chances[1])


class Compared(int):
    """A token that counts its comparisons."""

    count = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other


def test_the_search_ends_at_the_first_longest_match() -> None:
    drafter, seq = NgramDrafter(), decoding()
    seq.tokens = [Compared(token) for _ in range(40) for token in range(40)]
    drafter.acceptance_probs(seq, 8)
    Compared.count = 0
    assert drafter.acceptance_probs(seq, 8)
    assert Compared.count < 3 * 32, "the seven earlier copies are not compared"
