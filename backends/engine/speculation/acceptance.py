"""How often proposals of each kind turn out right: of one sequence, and of all before it."""

from __future__ import annotations

# what a sequence knows of itself fades, for texts change; what all know stays longer
_FADE_OWN = 0.98
_FADE_ALL = 0.995
_FADE_REST = 0.997


class _Rate:
    """Right ones among so many, old ones fading."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float, tried: float) -> None:
        self.right, self.tried = right, tried

    def add(self, is_right: bool, fade: float) -> None:
        self.right = fade * self.right + is_right
        self.tried = fade * self.tried + 1.0


class Common:
    """What all sequences of an engine have seen. prior: assumed of each kind at first, as if
    `weight` tokens had been seen. counts: all together as so many tokens of a sequence's own."""

    def __init__(
        self, prior: tuple[float, ...], *, weight: float = 2.0, counts: float = 6.0
    ) -> None:
        self.counts = counts
        self._prior, self._weight = prior, weight
        self._rates = [_Rate(weight * chance, weight) for chance in prior]

    def add(self, kind: int, is_right: bool) -> None:
        """Enter a token of that kind."""
        self._rates[kind].add(is_right, _FADE_ALL)

    def rest(self) -> None:
        """Nothing was tried in a step: what was seen counts less, the prior more."""
        back = (1 - _FADE_REST) * self._weight
        for rate, chance in zip(self._rates, self._prior, strict=True):
            rate.right = _FADE_REST * rate.right + back * chance
            rate.tried = _FADE_REST * rate.tried + back

    def chance(self, kind: int) -> float:
        """Share of right ones among tokens of that kind."""
        rate = self._rates[kind]
        return rate.right / rate.tried


class Acceptance:
    """What one sequence has seen, leaning on what all have while that is little."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._own: dict[int, _Rate] = {}

    def add(self, kind: int, is_right: bool) -> None:
        """Enter a token of that kind."""
        self._own.setdefault(kind, _Rate(0.0, 0.0)).add(is_right, _FADE_OWN)
        self._common.add(kind, is_right)

    def rest(self, tokens: int) -> None:
        """The text went on by so many tokens with nothing tried: one day it is worth a try."""
        for rate in self._own.values():
            rate.right *= _FADE_REST**tokens
            rate.tried *= _FADE_REST**tokens

    def chance(self, kind: int) -> float:
        """Chance that the next token of that kind is right, given that those before it are."""
        own = self._own.get(kind)
        chance = self._common.chance(kind)
        if own is None:
            return chance
        counts = self._common.counts
        return (own.right + counts * chance) / (own.tried + counts)
