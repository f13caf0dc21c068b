"""Which model drafts for another: the one that was asked for, or the one the catalog names."""

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

_NGRAM_FALLBACK = "drafts come from the text alone"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What `--draft` comes to for one model.

    option: as it stands among options, a model by its path. file: the draft model; None: there is
    none, or it cannot be had. optional: whether that is as good. note: what a user should know.
    """

    option: str | None = None
    file: ModelFile | None = None
    optional: bool = False
    note: str = ""

    @classmethod
    def from_model(cls, file: ModelFile, *, optional: bool) -> DraftChoice:
        """A model drafts."""
        return cls(str(file.path), file, optional)

    @property
    def draft_model(self) -> DraftModelRequest | None:
        """As an engine gets it."""
        if self.file is None:
            return None
        return DraftModelRequest(self.file.name, str(self.file.path), self.optional)

    @property
    def effective_option(self) -> str | None:
        """As it stands among the options that a model is loaded with."""
        lost = self.file is None and self.option not in (None, *DRAFT_KEYWORDS)
        return DRAFT_NGRAM if lost else self.option

    def without_model(self, reason: str) -> DraftChoice:
        """The same with the text alone. reason: the draft model cannot be had."""
        return replace(self, file=None, note=f"{_NGRAM_FALLBACK}: {reason}")

    def for_placement(self, placement: Placement) -> DraftChoice:
        """The same where the model runs. InvalidRequest: that cannot run the draft model."""
        if self.file is None or self.file.is_gguf or placement.backend != "llamacpp":
            return self
        why = f"llama.cpp runs .gguf files, {self.file.path} is none"
        if self.optional:
            return self.without_model(why)
        raise InvalidRequest(f"--draft: {why}", param="draft")


def resolve_draft_model(
    requested: str | None,
    default: str | None,
    target: ModelFile,
    resolve_file: Callable[[str], ModelFile],
) -> DraftChoice:
    """What is asked for; if nothing, what is usual here, as far as it can be had.

    resolve_file: a name's model. ModelNotFound, InvalidRequest: what is asked for cannot be had.
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
    """The catalog's draft model for this one, of the same format if both are here."""
    entry = catalog_entry_of(target)
    if entry is None or entry.draft is None:
        why = f"the catalog has no draft model for {target.name}"
        return DraftChoice(DRAFT_NGRAM, note=f"{_NGRAM_FALLBACK}: {why}")
    for name in entry.draft_names(is_gguf=target.is_gguf):
        try:
            return DraftChoice.from_model(resolve_file(name), optional=True)
        except ModelNotFound:
            continue
    why = f"{entry.draft} is not here, localgen pull {entry.draft} fetches it"
    return DraftChoice(DRAFT_NGRAM, note=f"{_NGRAM_FALLBACK}: {why}")
