"""N-gram drafter: tokens that followed an earlier occurrence of the same n-gram (prompt lookup)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.drafter import DecayedRatio, Drafter, DraftProposal
from localgen.backends.runner.sequence import Sequence

# shortest match, and the length from which on matches count as equally long
MIN_MATCH, _MAX_MATCH = 2, 32
# the latest positions of each pair of tokens that are compared
_POSITIONS_PER_PAIR = 8
# initial acceptance after matches of 2, 4, 8, 16 and 32 tokens and more: short matches are mostly
# chance, long ones are copies
_PRIORS, _PRIOR_WEIGHT = (0.1, 0.3, 0.6, 0.8, 0.9), 2.0


class NgramDrafter(Drafter):
    """Looks the end of a sequence up in its own prompt and answer; the longest match wins, the
    latest of equals (prompt lookup decoding, Saxena 2023).

    Acceptance is learned by length of match without drafting: each new token is compared with what
    would have been proposed.
    """

    name = "n-gram"

    def __init__(self) -> None:
        self._shared = [DecayedRatio(prior, _PRIOR_WEIGHT) for prior in _PRIORS]
        self._indexes: WeakKeyDictionary[Sequence, _NgramIndex] = WeakKeyDictionary()

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        if seq not in self._indexes:
            decay = DecayedRatio.RECENT
            rates = [DecayedRatio(decay=decay, shared=shared) for shared in self._shared]
            self._indexes[seq] = _NgramIndex(seq.tokens, rates)
        return self._indexes[seq].acceptance_probs(max_drafts)

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        found = {seq: self._indexes[seq].continuation(count) for seq, count in requests.items()}
        return {seq: DraftProposal(tokens) for seq, tokens in found.items() if tokens}

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        if seq in self._indexes:
            self._indexes[seq].observe(len(new_tokens))


class _NgramIndex:
    """The tokens of a sequence, its own growing list, and the positions of each pair of them.

    rates: acceptance by length of match, one for each power of two from 2 on.
    """

    def __init__(self, tokens: list[int], rates: list[DecayedRatio]) -> None:
        self._tokens, self._rates = tokens, rates
        self._positions: dict[tuple[int, int], list[int]] = {}
        self._indexed = 1  # pairs that end before this position are in _positions

    def acceptance_probs(self, max_drafts: int) -> list[float]:
        """Of the tokens after the longest match, which grows with each accepted token."""
        length, _ = self._longest_match(len(self._tokens))
        if not length:
            return []
        probs = [rate.value for rate in self._rates]
        growing = [probs[each.bit_length() - 2] for each in range(length, _MAX_MATCH)]
        return (growing + probs[-1:] * max_drafts)[: max(0, max_drafts)]

    def continuation(self, count: int) -> list[int]:
        """Tokens after the longest match; a repetition continues beyond the end."""
        length, follows = self._longest_match(len(self._tokens))
        period = len(self._tokens) - follows
        return [self._tokens[follows + ahead % period] for ahead in range(count if length else 0)]

    def observe(self, num_new: int) -> None:
        """Record whether each of the last num_new tokens would have been drafted."""
        tokens = self._tokens
        for at in range(len(tokens) - num_new, len(tokens)):
            length, follows = self._longest_match(at)
            if length:
                self._rates[length.bit_length() - 2].add(tokens[follows] == tokens[at])

    def _longest_match(self, end: int) -> tuple[int, int]:
        """Length of the longest match of the text before `end`, and the position after it."""
        tokens, best, follows = self._tokens, 0, 0
        if end <= MIN_MATCH:
            return 0, 0
        self._index_until(end - 1)
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
            known = self._positions.setdefault((self._tokens[at - 1], self._tokens[at]), [])
            known.append(at)
            del known[:-_POSITIONS_PER_PAIR]
        self._indexed = max(self._indexed, end)
