"""When a plain step is due: what drafts gain is measured by what plain steps take by now."""

from __future__ import annotations

# while drafts pay, a plain step takes this share of the time, but one comes every so many steps,
# at most and at least
_SHARE, _EVERY = 0.01, (16, 64)
# sooner after so many plain steps without a draft, for a few slow ones make drafts seem to pay:
# after the first draft, and then after twice as many as before; not where so much is gained that
# plain steps would have to be believed for very wrong
_LONG, _FIRST, _CLEAR = 8, 1, 2.0
# one that took less than this of what was believed is followed by others, until it is believed
_AS_BELIEVED = 0.9


class BaselineSchedule:
    """Counts steps with drafts from one plain step to the next."""

    def __init__(self) -> None:
        self.drafting = 0  # steps since a plain one
        self._plain = 0  # since one with drafts
        self._is_believed = True
        self._patience = _FIRST
        self._ms = self._plain_ms = 0.0

    def is_due(self, speedup: float) -> bool:
        """Whether the next step has to be plain. speedup: what drafts have gained lately."""
        if not self._is_believed:
            return True
        least, most = _EVERY
        every = max(least, min((1 - 1 / max(1.0, speedup)) / _SHARE, most))
        if self._plain_ms < _CLEAR * self._ms:
            every = min(every, self._patience)
        return self.drafting >= every

    def drafted(self, ms: float, plain_ms: float) -> None:
        """Enter a step with drafts, and what its tokens would take in plain steps."""
        if not self.drafting:
            self._ms = self._plain_ms = 0.0
        self.drafting += 1
        self._plain = 0
        self._ms += ms
        self._plain_ms += plain_ms

    def plain(self, ms: float, believed_ms: float, *, steps: int = 1) -> None:
        """Enter so many plain steps, each of which took so long."""
        self._is_believed = ms >= _AS_BELIEVED * believed_ms
        self._plain += steps
        if self._plain >= _LONG:
            self._patience = _FIRST
        elif self.drafting >= self._patience:
            self._patience = min(2 * self._patience, _EVERY[1])
        self.drafting = 0
