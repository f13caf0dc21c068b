"""Options of `localgen serve` for loading models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How models are loaded unless a request says otherwise.

    model: that of `localgen serve MODEL`, for requests that name none. path: its file, once it is
    known: the options are for this model only. None: for every model.
    """

    load: LoadOptions = LoadOptions()
    model: str | None = None
    path: Path | None = None

    def complete(self, file: ModelFile, requested: LoadOptions) -> LoadOptions:
        """The options to load a model with: those that were requested, else these."""
        if self.model is not None and self.path != file.path:
            return requested
        given = {name: value for name, value in asdict(requested).items() if value is not None}
        return replace(self.load, **given)
