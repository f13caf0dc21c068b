"""Encoder-only embedding models (the BERT family), which cannot generate text."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.llamacpp.embeddings import LlamaEmbedder
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import ModelInfo, ModelLoadRequest
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams

_EMBEDDING_NOTE = "an embedding model: it serves /v1/embeddings and cannot chat"
_RANKING_NOTE = "a reranking model: it serves /v1/rerank and cannot chat"


class EncoderRunner:
    """A ModelRunner and Embedder for a model without a KV cache: `admit` always raises NoRoom."""

    def __init__(self, model: LlamaModel, options: LlamaOptions, max_len: int) -> None:
        self._model = model
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._embedder = LlamaEmbedder(model, options, self._executor)
        self.limits = Limits(
            max_seqs=1,
            max_batch_tokens=max(max_len, options.max_batch_tokens),
            max_outputs=1,
            max_len=max_len,
            kv_tokens=0,
            can_rewind=False,
            can_generate=False,
            can_rank=model.can_rank,
        )

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        return self._embedder.embed(inputs, max_tokens)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        raise NoRoom

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return 0

    def grow(self, seq: Sequence, n: int) -> bool:
        return False

    def rewind(self, seq: Sequence, length: int) -> None:
        """Do nothing: there is no KV cache."""

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Do nothing: there is no KV cache."""

    def launch(self, chunks: Seq[Chunk]) -> Seq[Chunk]:
        return chunks

    def collect(self, ticket: Seq[Chunk]) -> StepResult:
        raise StepFailed("an encoder model cannot generate text")

    def usage(self) -> PoolUsage:
        return PoolUsage(0, 0, 0)

    def close(self) -> None:
        self._embedder.close()
        self._executor.shutdown()
        self._model.close()


def load_encoder(
    request: ModelLoadRequest,
    model: LlamaModel,
    tokenizer: LlamaCppTokenizer,
    options: LlamaOptions,
    *,
    started_s: float,
) -> LoadedModel:
    """Load an encoder and test-run it. Raises LoadFailed if it cannot run."""
    ctx = min(options.ctx or model.ctx_train, model.ctx_train)
    runner = EncoderRunner(model, options, ctx)
    _test_run(runner, model)
    info = ModelInfo(
        name=request.name,
        path=request.path,
        architecture=model.architecture,
        description=model.description,
        params=model.num_params,
        size_bytes=model.size_bytes,
        vocab=tokenizer.vocab_size,
        ctx_train=model.ctx_train,
        ctx=ctx,
        kv_tokens=0,
        max_seqs=1,
        kv_bytes=0,
        layers=model.num_layers,
        backend="llamacpp",
        processor="100% GPU" if options.gpu_layers else "100% CPU",
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=False,
        chat_template=None,
        sampling=SamplingParams(),
        options=options.to_load_options(ctx, 0),
        notes=(_RANKING_NOTE if model.can_rank else _EMBEDDING_NOTE,),
        generates=False,
        embedding_width=0 if model.can_rank else model.embedding_width,
    )
    return LoadedModel(info=info, runner=runner, tokenizer=tokenizer, template=None)


def _test_run(runner: EncoderRunner, model: LlamaModel) -> None:
    """Embed a few tokens, which pages the weights in. Raises LoadFailed if that fails."""
    try:
        (found,) = runner.embed([[0] * min(4, runner.limits.max_len)], lambda: 4)
    except (StepFailed, LocalgenError) as error:
        raise LoadFailed(f"cannot run {model.path}: {error}") from error
    assert found.vectors is not None
    if not np.isfinite(found.vectors).all():
        raise LoadFailed(f"cannot run {model.path}: its weights produce NaN or infinity")
