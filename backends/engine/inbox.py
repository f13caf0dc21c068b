"""What other threads ask of the engine loop, besides requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request, unless it has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """End the reasoning of a request, if it reasons."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""
