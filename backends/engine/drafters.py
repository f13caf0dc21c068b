"""Drafters by the names that users give them."""

from __future__ import annotations

from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DRAFT_NGRAM, DRAFT_NONE, ModelLoadRequest


def validate_draft_options(request: ModelLoadRequest) -> None:
    """InvalidRequest: no drafter is called that, or it may draft less than nothing."""
    options, most = request.options, request.options.draft_max
    if request.draft is None and options.draft not in (None, DRAFT_NGRAM, DRAFT_NONE):
        raise InvalidRequest(
            f"draft is {options.draft!r}, it must be {DRAFT_NGRAM} or {DRAFT_NONE}, or a model",
            param="draft",
        )
    if most is not None and most < 1:
        raise InvalidRequest(
            f"draft_max is {most}, it must be at least 1: --draft none for no drafts at all",
            param="draft_max",
        )


def create_drafters(model: LoadedModel) -> list[Drafter]:
    """Those that a model was loaded with: the text, and beside it a draft model."""
    found: list[Drafter] = (
        [] if model.info.options.draft in (None, DRAFT_NONE) else [NgramDrafter()]
    )
    if model.draft is not None:
        draft = model.draft
        found.append(
            ModelDrafter(draft.runner, draft.info.name, shared_vocab_size=draft.shared_vocab_size)
        )
    return found
