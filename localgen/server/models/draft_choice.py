"""Which model drafts for another: the one that was asked for, or the one the catalog names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import AUTO, DRAFT_WORDS, NGRAM, NONE, DraftModel
from localgen.hub.metadata import entry_of
from localgen.placement.backend_choice import Placement

_TEXT_ALONE = "drafts come from the text alone"


@dataclass(frozen=True, slots=True)
class Drafting:
    """What `--draft` comes to for one model.

    asked: as it stands among options, a model by its path. file: the draft model; None: there is
    none, or it cannot be had. optional: whether that is as good. note: what a user should know.
    """

    asked: str | None = None
    file: ModelFile | None = None
    optional: bool = False
    note: str = ""

    @classmethod
    def by(cls, file: ModelFile, *, optional: bool) -> Drafting:
        """A model drafts."""
        return cls(str(file.path), file, optional)

    @property
    def message(self) -> DraftModel | None:
        """As an engine gets it."""
        if self.file is None:
            return None
        return DraftModel(self.file.name, str(self.file.path), self.optional)

    @property
    def in_force(self) -> str | None:
        """As it stands among the options that a model is loaded with."""
        lost = self.file is None and self.asked not in (None, *DRAFT_WORDS)
        return NGRAM if lost else self.asked

    def without(self, why: str) -> Drafting:
        """The same with the text alone. why: the draft model cannot be had."""
        return replace(self, file=None, note=f"{_TEXT_ALONE}: {why}")

    def on(self, placement: Placement) -> Drafting:
        """The same where the model runs. InvalidRequest: that cannot run the draft model."""
        if self.file is None or self.file.is_gguf or placement.backend != "llamacpp":
            return self
        why = f"llama.cpp runs .gguf files, {self.file.path} is none"
        if self.optional:
            return self.without(why)
        raise InvalidRequest(f"--draft: {why}", param="draft")


def find_draft(
    asked: str | None, usual: str | None, target: ModelFile, find: Callable[[str], ModelFile]
) -> Drafting:
    """What is asked for; if nothing, what is usual here, as far as it can be had.

    find: a name's model. ModelNotFound, InvalidRequest: what is asked for cannot be had.
    """
    name = usual if asked is None else asked
    if name in (None, NGRAM, NONE):
        return Drafting(name)
    if name == AUTO:
        return _paired(target, find)
    try:
        file = find(name)
    except LocalgenError as error:
        if asked is None:
            return Drafting(NGRAM, note=f"{_TEXT_ALONE}: {error.message}")
        raise type(error)(f"--draft {name}: {error.message}", param="draft") from error
    if asked is None and file.path == target.path:
        return Drafting(NGRAM)
    return Drafting.by(file, optional=asked is None)


def _paired(target: ModelFile, find: Callable[[str], ModelFile]) -> Drafting:
    """The catalog's draft model for this one, of the same format if both are here."""
    entry = entry_of(target)
    if entry is None or entry.draft is None:
        why = f"the catalog has no draft model for {target.name}"
        return Drafting(NGRAM, note=f"{_TEXT_ALONE}: {why}")
    for name in entry.draft_names(is_gguf=target.is_gguf):
        try:
            return Drafting.by(find(name), optional=True)
        except ModelNotFound:
            continue
    why = f"{entry.draft} is not here, localgen pull {entry.draft} fetches it"
    return Drafting(NGRAM, note=f"{_TEXT_ALONE}: {why}")
