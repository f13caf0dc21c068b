"""Drafts from the sequence's own text: what followed the last time it read like this."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.acceptance import Acceptance, Common
from localgen.backends.engine.speculation.drafter import Proposal
from localgen.backends.runner.sequence import Sequence

# a match is at least so many tokens
LEAST = 2
# places of each pair that are compared, the latest ones
_PLACES = 8
# matches count as equally long from here on
_LONGEST = 32
# a kind is a length of match: up to each of these
_BOUNDS = (2, 3, 4, 6, 8, 12, 16, 24, _LONGEST)
_KIND = tuple(
    next(kind for kind, bound in enumerate(_BOUNDS) if length <= bound)
    for length in range(_LONGEST + 1)
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
    must_be_tried = False
    failure = ""

    def __init__(self) -> None:
        self._common = Common(_PRIOR)
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()

    def chances(self, seq: Sequence, most: int) -> list[float]:
        """As Drafter.chances."""
        return self._text(seq).chances(most)

    def draft_ms(self, sequences: int) -> float:
        """As Drafter.draft_ms: too little to count."""
        return 0.0

    def usual_chance(self) -> float:
        """As Drafter.usual_chance: it is ready at once."""
        return 0.0

    def catch_up(self, most_ms: float) -> None:
        """As Drafter.catch_up."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        """As Drafter.propose."""
        return [Proposal(self._text(seq).drafts(count)) for seq, count in wanted]

    def learn(self, seq: Sequence, tokens: Seq[int]) -> None:
        """As Drafter.learn."""
        text = self._texts.get(seq)
        if text is not None:
            text.compare(tokens)

    def forget(self, seq: Sequence) -> None:
        """As Drafter.forget: its text stays what it is."""

    def close(self) -> None:
        """As Drafter.close."""
        self._texts.clear()

    def _text(self, seq: Sequence) -> _Text:
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _Text(seq.tokens, Acceptance(self._common))
        return text


class _Text:
    """The tokens of a sequence, and where each pair of them stands.

    tokens: the sequence's own list, which grows.
    """

    __slots__ = ("_acceptance", "_indexed", "_places", "_tokens")

    def __init__(self, tokens: list[int], acceptance: Acceptance) -> None:
        self._tokens = tokens
        self._acceptance = acceptance
        self._places: dict[tuple[int, int], list[int]] = {}
        self._indexed = 1  # pairs that end before this position are known

    def chances(self, most: int) -> list[float]:
        """Of what followed the longest match of the end, the match growing with each token."""
        length, _ = self._longest(len(self._tokens))
        if not length:
            return []
        kinds = [_KIND[min(length + ahead, _LONGEST)] for ahead in range(most)]
        known = {kind: self._acceptance.chance(kind) for kind in set(kinds)}
        return [known[kind] for kind in kinds]

    def drafts(self, count: int) -> list[int]:
        """What followed the longest match; a repetition goes on beyond the end."""
        tokens, end = self._tokens, len(self._tokens)
        length, follows = self._longest(end)
        if not length:
            return []
        found = tokens[follows : follows + count]
        while len(found) < count:
            found.append(found[len(found) + follows - end])
        return found

    def compare(self, came: Seq[int]) -> None:
        """The tokens at the end have just come: enter how each would have been foreseen."""
        tokens = self._tokens
        for at in range(len(tokens) - len(came), len(tokens)):
            length, follows = self._longest(at)
            if length:
                self._acceptance.add(_KIND[length], tokens[follows] == tokens[at])

    def _longest(self, end: int) -> tuple[int, int]:
        """Length of the longest match of what stands before `end`, and what follows it; 0: none."""
        tokens = self._tokens
        if end < LEAST + 1:
            return 0, 0
        self._index(end - 1)
        best, follows = 0, 0
        for place in reversed(self._places.get((tokens[end - 2], tokens[end - 1]), ())):
            length = self._match(place, end)
            if length > best:
                best, follows = length, place + 1
                if best == _LONGEST:
                    break
        return best, follows

    def _index(self, end: int) -> None:
        """Enter all pairs that end before this position: each has a token that follows."""
        tokens, places = self._tokens, self._places
        for at in range(self._indexed, end):
            known = places.setdefault((tokens[at - 1], tokens[at]), [])
            known.append(at)
            if len(known) > _PLACES:
                del known[0]
        self._indexed = max(self._indexed, end)

    def _match(self, place: int, end: int) -> int:
        """How many tokens up to `place` are those before `end`, at most _LONGEST."""
        tokens, length = self._tokens, LEAST
        most = min(_LONGEST, place + 1)
        while length < most and tokens[place - length] == tokens[end - 1 - length]:
            length += 1
        return length
