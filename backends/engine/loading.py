"""What goes into loading a model, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.engine.runner import ModelRunner
from localgen.backends.models import Load, ModelInfo
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a backend's loader hands over."""

    info: ModelInfo
    runner: ModelRunner
    tokenizer: Tokenizer
    template: ChatTemplate | None


# reads a model, reporting the share done (0 to 1). Raises LocalgenError
Loader = Callable[[Load, Callable[[float], None]], LoadedModel]
