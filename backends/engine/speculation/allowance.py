"""Time that may go to what does not pay by itself: looking for drafts, trying them, and reading,
which a draft model has to do before."""

from __future__ import annotations

# what seems not to pay is tried now and then, for this share of the time and for what drafts
# gained; that is so many plain steps at first, and saved up to so many times as many
_TRY_SHARE = 0.005
_TRY_STEPS, _TRY_SAVED = 3, 3
# each try that did not pay doubles the steps until the next, up to so many
_MOST_REST, _PAYS = 64, 1.03
# as much of what a step takes longer is lost where it is worth a try: some of its tokens are right
_RISKED = 0.25
# looking for drafts takes no more than this share of the time where it gains nothing, but is done
# every so many steps at least
_LOOK_SHARE = 0.004
_LOOK_EVERY = 64
# reading takes no more than this share beyond what drafts of such models have gained, but for so
# many plain steps at first: nothing is known of a draft model until it has read something
_READ_SHARE = 0.0025
_READ_STEPS = 8
# gains that are kept for it, in plain steps: a text may be long
_READ_SAVED = 128


class Allowance:
    """What may be spent now; earned by steps, and by what drafts gained. Times are milliseconds.

    to_lose_ms: what tries may lose.
    """

    def __init__(self) -> None:
        self.to_lose_ms = 0.0
        self._to_look_ms = self._to_read_ms = self._gained_ms = 0.0
        self._has_begun = False
        self._rest, self._resting = 1, 0  # steps between tries, and until the next

    def may_look(self, steps: int, ms: float) -> bool:
        """Whether to look for drafts; so many steps are not entered yet, which took so long."""
        return self._to_look_ms + _LOOK_SHARE * ms >= 0 or steps + 1 >= _LOOK_EVERY

    def looked(self, ms: float, step_ms: float) -> None:
        """Looking took so long, and led to no drafts in a step that took so long."""
        most_debt_ms = (_LOOK_EVERY - 1) * _LOOK_SHARE * step_ms
        self._to_look_ms = max(self._to_look_ms - ms, -most_debt_ms)

    def may_read(self, *, would_pay: bool) -> bool:
        """Whether a draft model may read; would_pay: whether drafts would, as far as is known."""
        return self._to_read_ms > 0 or (would_pay and self._gained_ms > 0)

    def read(self, ms: float, *, would_pay: bool) -> None:
        """It took so long."""
        if would_pay and self._gained_ms > 0:
            self._gained_ms -= ms
        else:
            self._to_read_ms -= ms

    def gained(self, ms: float, plain_step_ms: float) -> None:
        """A step with drafts of a model has gained so much, or lost. plain_step_ms: as of earn."""
        gained_ms = min(self._gained_ms + ms, _READ_SAVED * plain_step_ms)
        self._gained_ms = max(-_READ_STEPS * plain_step_ms, gained_ms)

    @property
    def to_risk_ms(self) -> float:
        """What a step that is worth a try may take longer than a plain one."""
        return self.to_lose_ms / _RISKED

    def pass_by(self, steps: int) -> None:
        """So many steps go by."""
        self._resting -= steps

    @property
    def is_time_to_try(self) -> bool:
        """Whether what seemed not to pay has rested."""
        return self._resting <= 0

    def tried(self, ms: float, plain_ms: float) -> None:
        """A try took so long, its tokens in plain steps so long."""
        self._rest = 1 if plain_ms > _PAYS * ms else min(2 * self._rest, _MOST_REST)
        self._resting = self._rest

    def earn(self, ms: float, plain_ms: float, plain_step_ms: float) -> None:
        """Steps took so long, and would have taken so long without drafts. plain_step_ms: what one
        plain step takes."""
        if not self._has_begun:
            self._has_begun = True
            self.to_lose_ms = self._to_look_ms = _TRY_STEPS * plain_step_ms
            self._to_read_ms = _READ_STEPS * plain_step_ms
        # what something else delayed once, or is done but once, must not forbid it for long
        most_ms = _TRY_STEPS * plain_step_ms
        to_lose_ms = self.to_lose_ms + _TRY_SHARE * ms + plain_ms - ms
        self.to_lose_ms = max(-most_ms, min(to_lose_ms, _TRY_SAVED * most_ms))
        to_look_ms = self._to_look_ms + _LOOK_SHARE * ms + max(0.0, plain_ms - ms)
        self._to_look_ms = min(to_look_ms, most_ms)
        to_read_ms = self._to_read_ms + _READ_SHARE * ms
        self._to_read_ms = max(-plain_step_ms, min(to_read_ms, _READ_STEPS * plain_step_ms))
