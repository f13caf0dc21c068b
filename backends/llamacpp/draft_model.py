"""A draft model for llama.cpp: its own weights and context, computed in the target's thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from localgen.backends.engine.draft_loading import require_prefix_cache, require_same_vocabulary
from localgen.backends.engine.loaded_model import LoadedDraftModel
from localgen.backends.errors import InvalidRequest
from localgen.backends.llamacpp import sizing
from localgen.backends.llamacpp.build_runner import (
    build_llama_runner,
    num_slots,
    probe_rewind,
)
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel, NoKVCache
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.model_info import DraftInfo, DraftModelRequest


class LlamaDraftModel:
    """Loads the weights of a draft model first and its runner once the KV cache size is known.

    Raises LocalgenError if the file cannot be loaded or cannot draft for this target.
    """

    def __init__(
        self,
        request: DraftModelRequest,
        options: LlamaOptions,
        target: LlamaModel,
        target_tokenizer: LlamaCppTokenizer,
    ) -> None:
        self._name = request.name
        self._open_context: LlamaContext | None = None
        require_prefix_cache(request, options.prefix_cache)
        _require_rewindable(target, f"{request.name} cannot draft for {target.path.name}, which")
        self._model = LlamaModel(Path(request.path), options, lambda share: None)
        try:
            _require_rewindable(self._model, f"{request.name} cannot draft, it")
            self._tokenizer = LlamaCppTokenizer(self._model)
            require_same_vocabulary(
                target_tokenizer,
                self._tokenizer,
                target_name=target.path.stem,
                draft_name=request.name,
            )
            self._shape = sizing.llama_model_shape(self._model)
        except BaseException:
            self._model.close()
            raise
        self._options = options
        self._shared_vocab_size = min(target_tokenizer.vocab_size, self._tokenizer.vocab_size)

    @property
    def weight_bytes(self) -> int:
        return self._model.size_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the compute buffers that do not grow with the KV pool."""
        return sizing.fixed_buffer_bytes(self._shape, self._options, self._num_slots)

    @property
    def pool_bytes_per_token(self) -> float:
        """Bytes for each token of the KV pool, including the buffers that grow with it."""
        return sizing.pool_bytes_per_token(self._shape, self._options)

    @property
    def _num_slots(self) -> int:
        return num_slots(self._model, self._options)

    def start_runner(
        self, options: LlamaOptions, size: KVSize, executor: ThreadPoolExecutor
    ) -> LoadedDraftModel:
        """Create the context and runner, with a KV pool as large as the target's.

        options: the target's resolved options. executor: the thread that computes for the target.
        """
        # a sliding-window cache cannot be split
        unified = options.kv_unified or self._model.has_sliding_window
        self._options = replace(options, kv_unified=unified)
        try:
            return self._start_runner(size, self._create_context(size, executor))
        except BaseException:
            self.close()
            raise

    def _create_context(self, size: KVSize, executor: ThreadPoolExecutor) -> LlamaContext:
        num_slots = self._num_slots
        try:
            self._open_context = LlamaContext(
                self._model,
                self._options,
                kv_tokens=size.kv_tokens,
                n_seq_max=num_slots,
                executor=executor,
            )
        except NoKVCache:
            raise InvalidRequest(
                f"{self._name} cannot draft: it is an embedding model", param="draft"
            ) from None
        return self._open_context

    def _start_runner(self, size: KVSize, context: LlamaContext) -> LoadedDraftModel:
        model, options, shape = self._model, self._options, self._shape
        if not probe_rewind(model, self._tokenizer, context):
            raise InvalidRequest(
                f"{self._name} cannot draft: its cache cannot be rewound", param="draft"
            )
        ctx = min(size.ctx, model.ctx_train)
        work = self.fixed_bytes + context.kv_tokens * sizing.compute_bytes_per_token(shape, options)
        info = DraftInfo(
            name=self._name,
            path=str(model.path),
            description=model.description,
            size_bytes=model.size_bytes,
            ctx=ctx,
            kv_bytes=int(context.kv_tokens * sizing.kv_bytes_per_token(shape, options)),
            work_bytes=work,
            memory=model.buffers.usage(),
        )
        runner = build_llama_runner(
            model, context, self._tokenizer, options, ctx=ctx, share_prefixes=True
        )
        return LoadedDraftModel(info, runner, self._shared_vocab_size)

    def close(self) -> None:
        """Free the weights and context if no runner was started."""
        if self._open_context is not None:
            self._open_context.close()
        self._model.close()


def _require_rewindable(model: LlamaModel, subject: str) -> None:
    """Raise InvalidRequest if the model keeps recurrent state, which cannot be rewound."""
    if model.is_recurrent:
        raise InvalidRequest(
            f"{subject} keeps recurrent state that cannot be rewound: leave --draft out",
            param="draft",
        )
