"""A draft model beside another: weights and a context of its own, computed in the same thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from localgen.backends.engine.loaded_model import LoadedDraft
from localgen.backends.engine.optional_draft import require_prefix_cache
from localgen.backends.engine.speculation.vocabulary import require_same
from localgen.backends.errors import InvalidRequest
from localgen.backends.llamacpp import sizing
from localgen.backends.llamacpp.build_runner import assemble, max_donors, probe
from localgen.backends.llamacpp.native import Context, Model, NoCache
from localgen.backends.llamacpp.options import Settings
from localgen.backends.llamacpp.vocab import Vocab
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.model_info import DraftInfo, DraftModel


class Draft:
    """Its weights at first; a runner once the sizes are settled.

    LocalgenError: the file cannot be loaded, or cannot draft for this target.
    """

    def __init__(
        self, asked: DraftModel, options: Settings, target: Model, target_vocab: Vocab
    ) -> None:
        self._name = asked.name
        self._opened: Context | None = None
        require_prefix_cache(asked, options.prefix_cache)
        _require_way_back(target, f"{asked.name} cannot draft for {target.path.name}, which")
        self._model = Model(Path(asked.path), options, lambda share: None)
        try:
            _require_way_back(self._model, f"{asked.name} cannot draft, it")
            self._vocab = Vocab(self._model)
            require_same(
                target_vocab, self._vocab, target_name=target.path.stem, draft_name=asked.name
            )
            self._shape = sizing.shape_of(self._model)
        except BaseException:
            self._model.close()
            raise
        self._options = options
        self._usable = min(target_vocab.vocab_size, self._vocab.vocab_size)

    @property
    def weight_bytes(self) -> int:
        return self._model.size_bytes

    @property
    def fixed_bytes(self) -> int:
        """Of buffers that do not grow with the pool."""
        return sizing.fixed_bytes(self._shape, self._options, self._lanes)

    @property
    def token_bytes(self) -> float:
        """Of each token of the pool."""
        return sizing.pool_token_bytes(self._shape, self._options)

    @property
    def _lanes(self) -> int:
        return self._options.parallel + max_donors(self._model, self._options)

    def start(self, options: Settings, size: Size, thread: ThreadPoolExecutor) -> LoadedDraft:
        """Its context, as large as the target's, which are of these options. thread: that computes
        for the target."""
        # the cache of a sliding window has no parts
        unified = options.kv_unified or self._model.has_window
        self._options = replace(options, kv_unified=unified)
        try:
            return self._start(size, self._context(size, thread))
        except BaseException:
            self.close()
            raise

    def _context(self, size: Size, thread: ThreadPoolExecutor) -> Context:
        lanes = self._lanes
        try:
            self._opened = Context(
                self._model,
                self._options,
                kv_tokens=size.kv_tokens,
                n_seq_max=lanes,
                thread=thread,
            )
        except NoCache:
            raise InvalidRequest(
                f"{self._name} cannot draft: it makes embeddings and no text", param="draft"
            ) from None
        return self._opened

    def _start(self, size: Size, context: Context) -> LoadedDraft:
        model, options, shape = self._model, self._options, self._shape
        if not probe(model, self._vocab, context):
            raise InvalidRequest(
                f"{self._name} cannot draft: its cache cannot be rewound", param="draft"
            )
        ctx = min(size.ctx, model.ctx_train)
        work = self.fixed_bytes + context.kv_tokens * sizing.work_token_bytes(shape, options)
        info = DraftInfo(
            name=self._name,
            path=str(model.path),
            description=model.description,
            size_bytes=model.size_bytes,
            ctx=ctx,
            kv_bytes=int(context.kv_tokens * sizing.kv_bytes_per_token(shape, options)),
            work_bytes=work,
            memory=model.buffers.use(),
        )
        runner = assemble(model, context, self._vocab, options, ctx=ctx, share=True)
        return LoadedDraft(info, runner, self._usable)

    def close(self) -> None:
        """Give everything back, where there is to be no runner."""
        if self._opened is not None:
            self._opened.close()
        self._model.close()


def _require_way_back(model: Model, subject: str) -> None:
    """InvalidRequest: what it has computed cannot be taken back."""
    if model.is_recurrent:
        raise InvalidRequest(
            f"{subject} keeps a state that cannot go back by a token: leave --draft out",
            param="draft",
        )
