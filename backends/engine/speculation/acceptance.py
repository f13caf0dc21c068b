"""How often proposals of each kind turn out right: of one sequence, and of all before it."""

from __future__ import annotations

# what a sequence knows of itself fades, for texts change; what all know stays longer
_SEQUENCE_DECAY = 0.98
_SHARED_DECAY = 0.995
_IDLE_DECAY = 0.997


class _AcceptanceRate:
    """Right ones among so many, old ones fading."""

    __slots__ = ("accepted", "proposed")

    def __init__(self, right: float, tried: float) -> None:
        self.accepted, self.proposed = right, tried

    def add(self, is_accepted: bool, decay: float) -> None:
        self.accepted = decay * self.accepted + is_accepted
        self.proposed = decay * self.proposed + 1.0


class SharedPrior:
    """What all sequences of an engine have seen. prior: assumed of each kind at first, as if
    `prior_weight` tokens had been seen. weight: all together as so many tokens of a sequence's
    own."""

    def __init__(
        self, prior: tuple[float, ...], *, prior_weight: float = 2.0, weight: float = 6.0
    ) -> None:
        self.weight = weight
        self._prior, self._prior_weight = prior, prior_weight
        self._rates = [_AcceptanceRate(prior_weight * chance, prior_weight) for chance in prior]

    def add(self, bucket: int, is_accepted: bool) -> None:
        """Enter a token of that kind."""
        self._rates[bucket].add(is_accepted, _SHARED_DECAY)

    def decay(self) -> None:
        """Nothing was tried in a step: what was seen counts less, the prior more."""
        back = (1 - _IDLE_DECAY) * self._prior_weight
        for rate, chance in zip(self._rates, self._prior, strict=True):
            rate.accepted = _IDLE_DECAY * rate.accepted + back * chance
            rate.proposed = _IDLE_DECAY * rate.proposed + back

    def probability(self, bucket: int) -> float:
        """Share of right ones among tokens of that kind."""
        rate = self._rates[bucket]
        return rate.accepted / rate.proposed


class AcceptanceEstimator:
    """What one sequence has seen, leaning on what all have while that is little."""

    def __init__(self, shared: SharedPrior) -> None:
        self._shared = shared
        self._rates: dict[int, _AcceptanceRate] = {}

    def add(self, bucket: int, is_accepted: bool) -> None:
        """Enter a token of that kind."""
        self._rates.setdefault(bucket, _AcceptanceRate(0.0, 0.0)).add(is_accepted, _SEQUENCE_DECAY)
        self._shared.add(bucket, is_accepted)

    def decay(self, num_tokens: int) -> None:
        """The text went on by so many tokens with nothing tried: one day it is worth a try."""
        for rate in self._rates.values():
            rate.accepted *= _IDLE_DECAY**num_tokens
            rate.proposed *= _IDLE_DECAY**num_tokens

    def probability(self, bucket: int) -> float:
        """Chance that the next token of that kind is right, given that those before it are."""
        own = self._rates.get(bucket)
        chance = self._shared.probability(bucket)
        if own is None:
            return chance
        counts = self._shared.weight
        return (own.accepted + counts * chance) / (own.proposed + counts)
