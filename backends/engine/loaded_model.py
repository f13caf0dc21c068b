"""What goes into loading a model, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.model_info import DraftInfo, ModelInfo, ModelLoadRequest
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model beside the model. shared_vocab_size: ids from here on mean nothing to one of
    both."""

    info: DraftInfo
    runner: ModelRunner
    shared_vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a backend's loader hands over."""

    info: ModelInfo
    runner: ModelRunner
    tokenizer: Tokenizer
    template: ChatTemplate | None
    draft: LoadedDraftModel | None = None


# reads a model, reporting the share done (0 to 1). Raises LocalgenError
ModelLoader = Callable[[ModelLoadRequest, Callable[[float], None]], LoadedModel]
