"""Drafters by the names that users give them."""

from __future__ import annotations

from localgen.backends.engine.drafts.drafter import Drafter
from localgen.backends.engine.drafts.ngram import NgramDrafter
from localgen.backends.errors import InvalidRequest

NGRAM, NONE = "ngram", "none"


def check(draft: str, most: int) -> None:
    """InvalidRequest: no drafter is called that, or it may draft less than nothing."""
    if draft not in (NGRAM, NONE):
        raise InvalidRequest(f"draft is {draft!r}, it must be {NGRAM} or {NONE}", param="draft")
    if most < 1:
        raise InvalidRequest(
            f"draft_max is {most}, it must be at least 1: --draft none for no drafts at all",
            param="draft_max",
        )


def drafters(draft: str | None) -> list[Drafter]:
    """Those of a checked name."""
    return [NgramDrafter()] if draft == NGRAM else []
