"""What is sent to a running request. Without msgspec, which the engine alone does not need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request; its final event follows. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """End the reasoning of a request, if it reasons. Unknown ids are ignored."""

    request_id: str
