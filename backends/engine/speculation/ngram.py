"""N-gram drafter: tokens that followed an earlier occurrence of the same n-gram (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.stats import AcceptanceEstimator, AcceptanceRate
from localgen.backends.runner.sequence import Sequence

# shortest match, and the length from which on matches count as equally long
MIN_MATCH, _MAX_MATCH = 2, 32
# the latest positions of each pair of tokens that are compared
_POSITIONS_PER_PAIR = 8
# acceptance is estimated by length of match, up to each of these; at first as assumed here: short
# matches are mostly chance, long ones are copies
_BUCKETS = {2: 0.1, 3: 0.15, 4: 0.25, 6: 0.4, 8: 0.55, 12: 0.7, 16: 0.8, 24: 0.85, _MAX_MATCH: 0.9}
_BUCKET_OF_LENGTH = [
    next(bucket for bucket, bound in enumerate(_BUCKETS) if length <= bound)
    for length in range(_MAX_MATCH + 1)
]


class NgramDrafter(Drafter):
    """Looks the end of a sequence up in its own prompt and answer; the longest match wins, the
    latest of equals (prompt lookup decoding, Saxena 2023).

    Acceptance is learned without drafting: each new token is compared with what would have been
    proposed.
    """

    name = "n-gram"

    def __init__(self) -> None:
        self._shared = [AcceptanceRate(prior) for prior in _BUCKETS.values()]
        self._indexes: WeakKeyDictionary[Sequence, _NgramIndex] = WeakKeyDictionary()

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        return self._index_of(seq).acceptance_probs(max_drafts)

    def propose(
        self, requests: Seq[tuple[Sequence, int]], max_prefill_tokens: int
    ) -> list[DraftProposal]:
        return [DraftProposal(self._index_of(seq).continuation(count)) for seq, count in requests]

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        if seq in self._indexes:
            self._indexes[seq].observe(len(new_tokens))

    def _index_of(self, seq: Sequence) -> _NgramIndex:
        if seq not in self._indexes:
            self._indexes[seq] = _NgramIndex(seq.tokens, AcceptanceEstimator(self._shared))
        return self._indexes[seq]


class _NgramIndex:
    """The tokens of a sequence, its own growing list, and the positions of each pair of them."""

    def __init__(self, tokens: list[int], acceptance: AcceptanceEstimator) -> None:
        self._tokens = tokens
        self._acceptance = acceptance
        self._positions: dict[tuple[int, int], list[int]] = {}
        self._indexed = 1  # pairs that end before this position are in _positions

    def acceptance_probs(self, max_drafts: int) -> list[float]:
        """Of the tokens after the longest match, which grows with each accepted token."""
        length, _ = self._longest_match(len(self._tokens))
        if not length:
            return []
        lengths = range(length, length + max_drafts)
        buckets = [_BUCKET_OF_LENGTH[min(each, _MAX_MATCH)] for each in lengths]
        known = {bucket: self._acceptance.probability(bucket) for bucket in set(buckets)}
        return [known[bucket] for bucket in buckets]

    def continuation(self, count: int) -> list[int]:
        """Tokens after the longest match; a repetition continues beyond the end."""
        tokens, end = self._tokens, len(self._tokens)
        length, follows = self._longest_match(end)
        if not length:
            return []
        found = tokens[follows : follows + count]
        while len(found) < count:
            found.append(found[len(found) + follows - end])
        return found

    def observe(self, num_new: int) -> None:
        """Record whether each of the last num_new tokens would have been drafted."""
        tokens = self._tokens
        for at in range(len(tokens) - num_new, len(tokens)):
            length, follows = self._longest_match(at)
            if length:
                self._acceptance.add(_BUCKET_OF_LENGTH[length], tokens[follows] == tokens[at])

    def _longest_match(self, end: int) -> tuple[int, int]:
        """Length of the longest match of the text before `end`, and the position after it."""
        tokens = self._tokens
        if end <= MIN_MATCH:
            return 0, 0
        self._index_until(end - 1)
        best, follows = 0, 0
        for position in reversed(self._positions.get((tokens[end - 2], tokens[end - 1]), ())):
            length, limit = MIN_MATCH, min(_MAX_MATCH, position + 1)
            while length < limit and tokens[position - length] == tokens[end - 1 - length]:
                length += 1
            if length > best:
                best, follows = length, position + 1
                if best == _MAX_MATCH:
                    break
        return best, follows

    def _index_until(self, end: int) -> None:
        """Index all pairs that end before `end`: each has a token that follows."""
        for at in range(self._indexed, end):
            pair = self._tokens[at - 1], self._tokens[at]
            known = self._positions.setdefault(pair, [])
            known.append(at)
            if len(known) > _POSITIONS_PER_PAIR:
                del known[0]
        self._indexed = max(self._indexed, end)
