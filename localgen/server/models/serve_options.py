"""Options of `localgen serve` for loading models."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

from localgen.backends.formats.model_facts import read_model_shape
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions

_log = logging.getLogger("localgen.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How models are loaded unless a request says otherwise.

    model: that of `localgen serve MODEL`, for requests that name none: the options are for this
    model only, or for every model if it is None. identity: that of its file, once it is known.
    """

    load: LoadOptions = LoadOptions()
    model: str | None = None
    identity: str | None = None

    def complete(self, file: ModelFile, requested: LoadOptions) -> LoadOptions:
        """The options to load a model with: those that were requested, else these.

        A context for every model is at most what this model was trained for. May read its header.
        """
        if self.model is not None and self.identity != file.identity:
            return requested
        given = {name: value for name, value in asdict(requested).items() if value is not None}
        options = replace(self.load, **given)
        if self.model is not None or requested.ctx is not None:
            return options
        return replace(options, ctx=self._trained_ctx(file))

    def _trained_ctx(self, file: ModelFile) -> int | None:
        ctx = self.load.ctx
        shape = None if ctx is None else read_model_shape(file)
        if ctx is None or shape is None or not 0 < shape.ctx_train < ctx:
            return ctx
        _log.info(
            "%s was trained for %s tokens: its context is that, not %s as in --ctx",
            file.name,
            f"{shape.ctx_train:,}",
            f"{ctx:,}",
        )
        return shape.ctx_train
