"""A draft model beside another: weights, cache and steps of its own on the same device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.build_runner import AnyTokenizer, assemble, description_of, tokenizer_of
from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CACHE_NAMES, CACHE_TYPES, Settings
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.source import ModelSource, open_source
from localgen.backends.cuda.parallel.rank_model import Share
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.engine.loaded_model import LoadedDraft
from localgen.backends.engine.optional_draft import require_prefix_cache
from localgen.backends.engine.speculation.vocabulary import require_same
from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.model_info import DraftInfo, DraftModel, MemoryUse
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING, SamplingParams


class Draft:
    """Its weights at first; pages and a runner once there is room for them.

    LocalgenError: it cannot be loaded, or cannot draft for this target.
    """

    def __init__(
        self,
        asked: DraftModel,
        options: Settings,
        device: torch.device,
        target: ModelSource,
        target_tokenizer: AnyTokenizer,
    ) -> None:
        require_prefix_cache(asked, options.prefix_cache)
        if options.tp > 1:
            raise InvalidRequest(
                f"{asked.name} cannot draft with --tp {options.tp}: leave out one of both",
                param="tp",
            )
        self._asked, self._source = asked, open_source(Path(asked.path))
        self._dtype = self._source.dtype(device)
        self._options = _settled(options, self._dtype)
        self._tokenizer = tokenizer_of(self._source, options)
        require_same(
            target_tokenizer,
            self._tokenizer,
            target_name=target.path.stem,
            draft_name=asked.name,
        )
        self._usable = min(target.spec.vocab, self._source.spec.vocab)
        self._share = Share(self._source, self._options, self._dtype, Shard(self._source.spec))

    @property
    def weight_bytes(self) -> int:
        return self._share.weight_bytes

    @property
    def work_bytes(self) -> int:
        """What a step needs beside weights and cache."""
        return sizing.work_bytes(self._source.spec, self._options, self._dtype)

    @property
    def token_bytes(self) -> int:
        """Of each token of the pool."""
        return sizing.kv_bytes_per_token(self._source.spec, self._options.cache_dtype)

    def allocate(self, size: Size) -> bool:
        """As Share.allocate, for a pool as large as the target's."""
        return self._share.allocate(pages_for(size.kv_tokens), self._ctx(size))

    def start(self, size: Size) -> LoadedDraft:
        """Its runner, once there are pages."""
        kv_bytes = size.kv_tokens * self.token_bytes
        info = DraftInfo(
            name=self._asked.name,
            path=self._asked.path,
            description=description_of(self._source.spec, self._dtype),
            size_bytes=self.weight_bytes,
            ctx=self._ctx(size),
            kv_bytes=kv_bytes,
            work_bytes=self.work_bytes,
            memory=MemoryUse(weights=self.weight_bytes, kv=kv_bytes),
        )
        runner = assemble(
            self._source,
            self._options,
            self._tokenizer,
            self._share.steps,
            replace(size, ctx=self._ctx(size)),
            ahead=False,  # what comes after a draft is the target's to say
        )
        _warm_up(runner)
        return LoadedDraft(info, runner, self._usable)

    def _ctx(self, size: Size) -> int:
        return min(size.ctx, self._source.spec.max_len)


def _settled(options: Settings, dtype: torch.dtype) -> Settings:
    """The target's, with a cache in the draft model's own type where the target's is in its own."""
    if CACHE_TYPES[options.cache_type_k] in (torch.float8_e4m3fn, torch.int8):
        return options
    return replace(options, cache_type_k=CACHE_NAMES[dtype], cache_type_v=CACHE_NAMES[dtype])


def _warm_up(runner: CudaRunner) -> None:
    """A prompt and a token: kernels that its steps need are compiled now."""
    params = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
    seq = Sequence(id="probe", tokens=[0] * 4, num_prompt=4, params=params, ctx=8, limit=8)
    runner.admit(seq, spare=0)
    for start, tokens in ((0, [0] * 4), (4, [0])):
        chunk = Chunk(seq=seq, start=start, tokens=tokens, samples=True)
        runner.grow(seq, len(tokens))
        runner.collect(runner.launch([chunk]))
        seq.tokens.append(0)
        seq.num_computed += len(tokens)
    runner.release(seq, keep=False)
