"""What goes into loading a model, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.model_info import DraftInfo, Load, ModelInfo
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model beside the model. vocab: ids from here on mean nothing to one of both."""

    info: DraftInfo
    runner: ModelRunner
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a backend's loader hands over."""

    info: ModelInfo
    runner: ModelRunner
    tokenizer: Tokenizer
    template: ChatTemplate | None
    draft: LoadedDraft | None = None


# reads a model, reporting the share done (0 to 1). Raises LocalgenError
Loader = Callable[[Load, Callable[[float], None]], LoadedModel]
