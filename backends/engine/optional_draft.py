"""Loading a draft model beside another: the same rules on each runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from localgen.backends.engine.loaded_model import LoadedDraftModel
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import DRAFT_NGRAM, DraftModelRequest, LoadOptions

_Result = TypeVar("_Result")


def require_prefix_cache(requested: DraftModelRequest, prefix_cache: bool) -> None:
    """InvalidRequest: the runners cut their caches back only where they share them."""
    if not prefix_cache:
        raise InvalidRequest(
            f"{requested.name} cannot draft with --no-prefix-cache, which leaves no way back from "
            "a wrong token: leave out one of both",
            param="prefix_cache",
        )


class OptionalDraftLoader:
    """Steps towards a draft model. One that is optional may fail, of which a note is left."""

    def __init__(self, requested: DraftModelRequest | None) -> None:
        self._requested = requested
        self._notes: list[str] = []

    @property
    def requested(self) -> DraftModelRequest:
        """Within a step."""
        assert self._requested is not None
        return self._requested

    def run(self, step: Callable[[], _Result]) -> _Result | None:
        """What a step makes; None: nothing is wanted, or it failed. LocalgenError: and must not."""
        if self._requested is None or self._notes:
            return None
        try:
            return step()
        except LocalgenError as error:
            if not self._requested.optional:
                raise
            self._notes.append(f"drafts come from the text alone: {error.message}")
            return None

    def notes(
        self, draft: LoadedDraftModel | None, *, ctx: int, size_bytes: int
    ) -> tuple[str, ...]:
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

    def resolved_options(self, options: LoadOptions, draft: LoadedDraftModel | None) -> LoadOptions:
        """The options after all."""
        lost = self._requested is not None and draft is None
        return replace(options, draft=DRAFT_NGRAM) if lost else options
