"""What has become of drafts: recently, and of one sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_FADE = 0.98


@dataclass(slots=True)
class Recent:
    """Sums over recent steps, old ones fading.

    plain_ms: what plain steps would have taken for the same tokens.
    """

    steps: float = 0.0
    drafting: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0

    @property
    def speedup(self) -> float:
        """Against plain steps; 0: there was none."""
        return self.plain_ms / self.ms if self.ms else 0.0

    def add(
        self, *, drafting: bool, sequences: int, tokens: int, ms: float, plain_ms: float
    ) -> None:
        """Enter a step."""
        self._fade(1)
        self.steps += 1
        self.drafting += drafting
        self.sequences += sequences
        self.tokens += tokens
        self.ms += ms
        self.plain_ms += plain_ms

    def add_plain(self, steps: int, sequences: int, ms: float) -> None:
        """Enter so many steps without drafts, which took so long."""
        self._fade(steps)
        left = (1 - _FADE**steps) / (1 - _FADE)  # of so many, the first of them faded
        self.steps += left
        self.sequences += left * sequences
        self.tokens += left * sequences
        self.ms += left * ms / steps
        self.plain_ms += left * ms / steps

    def _fade(self, steps: int) -> None:
        kept = _FADE**steps
        self.steps *= kept
        self.drafting *= kept
        self.sequences *= kept
        self.tokens *= kept
        self.ms *= kept
        self.plain_ms *= kept


@dataclass(slots=True)
class Own:
    """What one sequence has had of it: its steps, and those with drafts for it.

    ms: of steps in which all were decoding; plain_ms: of plain ones for the same tokens. by: tokens
    that each drafter proposed.
    """

    steps: int = 0
    drafted: int = 0
    ms: float = 0.0
    plain_ms: float = 0.0
    by: Counter[str] = field(default_factory=Counter)

    def add_plain(self, steps: int, ms: float) -> None:
        """Enter so many steps without drafts, which took so long."""
        self.steps += steps
        self.ms += ms
        self.plain_ms += ms


@dataclass(frozen=True, slots=True)
class Drafting:
    """As Timings has it of one request."""

    steps: int = 0
    speedup: float = 0.0
    reason: str = ""
    by: tuple[str, ...] = ()


NO_DRAFTS = Drafting()
