"""Drafts from the sequence's own text: what followed the last time it read like this."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.acceptance import AcceptanceEstimator, SharedPrior
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.runner.sequence import Sequence

# a match is at least so many tokens
MIN_MATCH = 2
# places of each pair that are compared, the latest ones
_POSITIONS_PER_PAIR = 8
# matches count as equally long from here on
_MAX_MATCH = 32
# a kind is a length of match: up to each of these
_MATCH_LENGTH_BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, _MAX_MATCH)
_BUCKET_BY_LENGTH = tuple(
    next(kind for kind, bound in enumerate(_MATCH_LENGTH_BOUNDS) if length <= bound)
    for length in range(_MAX_MATCH + 1)
)
# before anything is known: short matches are mostly chance, long ones are copies
_PRIOR = (0.1, 0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.85, 0.9)


class NgramDrafter:
    """Looks the end of a sequence up in its own prompt and answer; the longest match wins, the
    latest of equals.

    Whether it is right can be seen without computing anything: each token that comes is compared
    with what would have been proposed (source: prompt lookup decoding, Saxena 2023).
    """

    name = "n-gram"
    needs_probing = False
    failure = ""

    def __init__(self) -> None:
        self._shared_prior = SharedPrior(_PRIOR)
        self._indexes: WeakKeyDictionary[Sequence, _NgramIndex] = WeakKeyDictionary()

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        """As Drafter.acceptance_probs."""
        return self._index_of(seq).acceptance_probs(max_drafts)

    def draft_ms(self, num_sequences: int) -> float:
        """As Drafter.draft_ms: too little to count."""
        return 0.0

    def default_acceptance(self) -> float:
        """As Drafter.default_acceptance: it is ready at once."""
        return 0.0

    def prefill(self, budget_ms: float) -> None:
        """As Drafter.prefill."""

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        """As Drafter.propose."""
        return [DraftProposal(self._index_of(seq).continuation(count)) for seq, count in requests]

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """As Drafter.observe."""
        text = self._indexes.get(seq)
        if text is not None:
            text.observe(new_tokens)

    def release(self, seq: Sequence) -> None:
        """As Drafter.release: its text stays what it is."""

    def close(self) -> None:
        """As Drafter.close."""
        self._indexes.clear()

    def _index_of(self, seq: Sequence) -> _NgramIndex:
        text = self._indexes.get(seq)
        if text is None:
            text = self._indexes[seq] = _NgramIndex(
                seq.tokens, AcceptanceEstimator(self._shared_prior)
            )
        return text


class _NgramIndex:
    """The tokens of a sequence, and where each pair of them stands.

    tokens: the sequence's own list, which grows.
    """

    __slots__ = ("_acceptance", "_indexed", "_positions", "_tokens")

    def __init__(self, tokens: list[int], acceptance: AcceptanceEstimator) -> None:
        self._tokens = tokens
        self._acceptance = acceptance
        self._positions: dict[tuple[int, int], list[int]] = {}
        self._indexed = 1  # pairs that end before this position are known

    def acceptance_probs(self, max_drafts: int) -> list[float]:
        """Of what followed the longest match of the end, the match growing with each token."""
        length, _ = self._longest_match(len(self._tokens))
        if not length:
            return []
        kinds = [_BUCKET_BY_LENGTH[min(length + ahead, _MAX_MATCH)] for ahead in range(max_drafts)]
        known = {kind: self._acceptance.probability(kind) for kind in set(kinds)}
        return [known[kind] for kind in kinds]

    def continuation(self, count: int) -> list[int]:
        """What followed the longest match; a repetition goes on beyond the end."""
        tokens, end = self._tokens, len(self._tokens)
        length, follows = self._longest_match(end)
        if not length:
            return []
        found = tokens[follows : follows + count]
        while len(found) < count:
            found.append(found[len(found) + follows - end])
        return found

    def observe(self, new_tokens: Seq[int]) -> None:
        """The tokens at the end have just come: enter how each would have been foreseen."""
        tokens = self._tokens
        for at in range(len(tokens) - len(new_tokens), len(tokens)):
            length, follows = self._longest_match(at)
            if length:
                self._acceptance.add(_BUCKET_BY_LENGTH[length], tokens[follows] == tokens[at])

    def _longest_match(self, end: int) -> tuple[int, int]:
        """Length of the longest match of what stands before `end`, and what follows it; 0: none."""
        tokens = self._tokens
        if end < MIN_MATCH + 1:
            return 0, 0
        self._index_until(end - 1)
        best, follows = 0, 0
        for place in reversed(self._positions.get((tokens[end - 2], tokens[end - 1]), ())):
            length = self._match_length(place, end)
            if length > best:
                best, follows = length, place + 1
                if best == _MAX_MATCH:
                    break
        return best, follows

    def _index_until(self, end: int) -> None:
        """Enter all pairs that end before this position: each has a token that follows."""
        tokens, places = self._tokens, self._positions
        for at in range(self._indexed, end):
            known = places.setdefault((tokens[at - 1], tokens[at]), [])
            known.append(at)
            if len(known) > _POSITIONS_PER_PAIR:
                del known[0]
        self._indexed = max(self._indexed, end)

    def _match_length(self, position: int, end: int) -> int:
        """How many tokens up to `position` are those before `end`, at most _MAX_MATCH."""
        tokens, length = self._tokens, MIN_MATCH
        most = min(_MAX_MATCH, position + 1)
        while length < most and tokens[position - length] == tokens[end - 1 - length]:
            length += 1
        return length
