"""Loading a draft model beside another: the same rules on each runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from localgen.backends.engine.loaded_model import LoadedDraft
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import NGRAM, DraftModel, LoadOptions

_Made = TypeVar("_Made")


def require_prefix_cache(asked: DraftModel, prefix_cache: bool) -> None:
    """InvalidRequest: the runners cut their caches back only where they share them."""
    if not prefix_cache:
        raise InvalidRequest(
            f"{asked.name} cannot draft with --no-prefix-cache, which leaves no way back from "
            "a wrong token: leave out one of both",
            param="prefix_cache",
        )


class Attempt:
    """Steps towards a draft model. One that is optional may fail, of which a note is left."""

    def __init__(self, asked: DraftModel | None) -> None:
        self._asked = asked
        self._notes: list[str] = []

    @property
    def asked(self) -> DraftModel:
        """Within a step."""
        assert self._asked is not None
        return self._asked

    def to(self, step: Callable[[], _Made]) -> _Made | None:
        """What a step makes; None: nothing is wanted, or it failed. LocalgenError: and must not."""
        if self._asked is None or self._notes:
            return None
        try:
            return step()
        except LocalgenError as error:
            if not self._asked.optional:
                raise
            self._notes.append(f"drafts come from the text alone: {error.message}")
            return None

    def notes(self, draft: LoadedDraft | None, *, ctx: int, size_bytes: int) -> tuple[str, ...]:
        """What a user should know. ctx, size_bytes: of the model that it drafts for."""
        if draft is None:
            return tuple(self._notes)
        name, own = draft.info.name, draft.info.ctx
        found = {
            f"{name} was trained for {own:,} tokens and drafts no further": own < ctx,
            f"{name} is no smaller than the model that it drafts for: it will hardly pay": (
                draft.info.size_bytes >= size_bytes
            ),
        }
        return tuple(note for note, so in found.items() if so)

    def in_force(self, options: LoadOptions, draft: LoadedDraft | None) -> LoadOptions:
        """The options after all."""
        lost = self._asked is not None and draft is None
        return replace(options, draft=NGRAM) if lost else options
