"""How often proposals of each kind turn out right: of one sequence, and of all before it."""

from __future__ import annotations

# what a sequence knows of itself fades, for texts change; what all know stays longer
_FADE_OWN = 0.98
_FADE_ALL = 0.995
_FADE_REST = 0.997
# all others together count as so many tokens of one's own
_WEIGHT_ALL = 4.0


class _Rate:
    """Right ones among so many, old ones fading."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float, tried: float) -> None:
        self.right, self.tried = right, tried

    def add(self, is_right: bool, fade: float) -> None:
        self.right = fade * self.right + is_right
        self.tried = fade * self.tried + 1.0


class Common:
    """What all sequences of an engine have seen. prior: assumed of each kind at first."""

    def __init__(self, prior: tuple[float, ...]) -> None:
        self._prior = prior
        # as if two had been seen
        self._rates = [_Rate(2.0 * chance, 2.0) for chance in prior]

    def add(self, kind: int, is_right: bool) -> None:
        """Enter a token of that kind."""
        self._rates[kind].add(is_right, _FADE_ALL)

    def rest(self, tokens: int) -> None:
        """Nothing was tried for so many tokens: what was seen counts less, the prior more."""
        fade = _FADE_REST**tokens
        for rate, chance in zip(self._rates, self._prior, strict=True):
            rate.right = fade * rate.right + (1 - fade) * 2.0 * chance
            rate.tried = fade * rate.tried + (1 - fade) * 2.0

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
        self._common.rest(tokens)

    def chance(self, kind: int) -> float:
        """Chance that the next token of that kind is right, given that those before it are."""
        own = self._own.get(kind)
        chance = self._common.chance(kind)
        if own is None:
            return chance
        return (own.right + _WEIGHT_ALL * chance) / (own.tried + _WEIGHT_ALL)
