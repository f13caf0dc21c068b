"""Resolve `--draft` to a draft model, the n-gram drafter, or no drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import (
    DRAFT_AUTO,
    DRAFT_KEYWORDS,
    DRAFT_NGRAM,
    DRAFT_NONE,
    DraftModelRequest,
)
from localgen.hub.metadata import catalog_entry_of
from localgen.placement.backend_choice import Placement

_NGRAM_FALLBACK = "using the n-gram drafter"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The resolved `--draft` of one target model.

    option: the value for LoadOptions.draft; a draft model is given by its path. file: the draft
    model, None if there is none or it is unavailable. optional: loading may continue without the
    draft model. note: a notice for the user, or empty.
    """

    option: str | None = None
    file: ModelFile | None = None
    optional: bool = False
    note: str = ""

    @classmethod
    def from_model(cls, file: ModelFile, *, optional: bool) -> DraftChoice:
        return cls(str(file.path), file, optional)

    @property
    def draft_model(self) -> DraftModelRequest | None:
        if self.file is None:
            return None
        return DraftModelRequest(self.file.name, str(self.file.path), self.optional)

    @property
    def effective_option(self) -> str | None:
        """The value for LoadOptions.draft; `ngram` if the draft model is unavailable."""
        lost = self.file is None and self.option not in (None, *DRAFT_KEYWORDS)
        return DRAFT_NGRAM if lost else self.option

    def without_model(self, reason: str) -> DraftChoice:
        """Return a copy that falls back to the n-gram drafter. reason: why, for the notice."""
        return replace(self, file=None, note=f"{_NGRAM_FALLBACK}: {reason}")

    def for_placement(self, placement: Placement) -> DraftChoice:
        """Return the choice for the backend of a placement.

        llama.cpp cannot run a draft model that is not GGUF: falls back to the n-gram drafter if the
        draft model is optional, else raises InvalidRequest.
        """
        if self.file is None or self.file.is_gguf or placement.backend != "llamacpp":
            return self
        why = f"llama.cpp runs .gguf files, {self.file.path} is not one"
        if self.optional:
            return self.without_model(why)
        raise InvalidRequest(f"--draft: {why}", param="draft")


def resolve_draft_model(
    requested: str | None,
    default: str | None,
    target: ModelFile,
    resolve_file: Callable[[str], ModelFile],
) -> DraftChoice:
    """Resolve the draft option: the requested one, else the server default.

    requested, default: a model name, `auto`, `ngram`, `none`, or None. resolve_file: resolves a
    model name. A missing default falls back to the n-gram drafter; a missing requested model
    raises the error of resolve_file (ModelNotFound, InvalidRequest).
    """
    name = default if requested is None else requested
    if name in (None, DRAFT_NGRAM, DRAFT_NONE):
        return DraftChoice(name)
    if name == DRAFT_AUTO:
        return _catalog_draft(target, resolve_file)
    try:
        file = resolve_file(name)
    except LocalgenError as error:
        if requested is None:
            return DraftChoice(DRAFT_NGRAM, note=f"{_NGRAM_FALLBACK}: {error.message}")
        raise type(error)(f"--draft {name}: {error.message}", param="draft") from error
    if requested is None and file.path == target.path:
        return DraftChoice(DRAFT_NGRAM)
    return DraftChoice.from_model(file, optional=requested is None)


def _catalog_draft(target: ModelFile, resolve_file: Callable[[str], ModelFile]) -> DraftChoice:
    """The catalog's draft model for the target, preferably in the same file format."""
    entry = catalog_entry_of(target)
    if entry is None or entry.draft is None:
        why = f"the catalog has no draft model for {target.name}"
        return DraftChoice(DRAFT_NGRAM, note=f"{_NGRAM_FALLBACK}: {why}")
    for name in entry.draft_names(is_gguf=target.is_gguf):
        try:
            return DraftChoice.from_model(resolve_file(name), optional=True)
        except ModelNotFound:
            continue
    why = f"{entry.draft} is not installed, localgen pull {entry.draft} downloads it"
    return DraftChoice(DRAFT_NGRAM, note=f"{_NGRAM_FALLBACK}: {why}")
