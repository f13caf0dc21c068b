"""Result types of model loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.adapters import ReadAdapter
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.model_info import DraftInfo, ModelInfo, ModelLoadRequest
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.template import PromptTemplate
from localgen.backends.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A draft model loaded next to the target model.

    shared_vocab_size: size of the vocabulary the two models share; larger ids are padding in one.
    """

    info: DraftInfo
    runner: ModelRunner
    shared_vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model as returned by a backend's loader.

    sandbox: runs what files and clients bring. prefix_store: keeps prefixes that the runner evicts.
    read_adapter: reads LoRA adapters for it, or None if the backend has none.
    """

    info: ModelInfo
    runner: ModelRunner
    tokenizer: Tokenizer
    template: PromptTemplate | None
    draft: LoadedDraftModel | None = None
    sandbox: Sandbox | None = None
    prefix_store: PrefixStore | None = None
    read_adapter: ReadAdapter | None = None


# loads a model, calling its second argument with the progress (0 to 1); raises LocalgenError
ModelLoader = Callable[[ModelLoadRequest, Callable[[float], None]], LoadedModel]
