"""A draft model for speculative decoding, with its own weights, KV cache and runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.build_runner import (
    AnyTokenizer,
    build_cuda_runner,
    describe_model,
    load_tokenizer,
)
from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CACHE_DTYPE_NAMES, CACHE_DTYPES, CudaOptions
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.source import ModelSource, open_model_source
from localgen.backends.cuda.parallel.rank_model import RankModel
from localgen.backends.cuda.runner import CudaRunner
from localgen.backends.engine.draft_loading import require_prefix_cache, require_same_vocabulary
from localgen.backends.engine.loaded_model import LoadedDraftModel
from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.model_info import DraftInfo, DraftModelRequest, MemoryUsage
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams
from localgen.backends.sandbox import Sandbox


class CudaDraftModel:
    """A draft model on the target's device.

    The weights are loaded first, the KV cache and the runner once memory has been sized.
    Raises LocalgenError if the model cannot be loaded or cannot draft for this target.
    """

    def __init__(
        self,
        request: DraftModelRequest,
        options: CudaOptions,
        device: torch.device,
        target_source: ModelSource,
        target_tokenizer: AnyTokenizer,
        sandbox: Sandbox | None = None,
    ) -> None:
        require_prefix_cache(request, options.prefix_cache)
        if options.tp > 1:
            raise InvalidRequest(
                f"{request.name} cannot be a draft model with --tp {options.tp}: "
                "leave out --draft or --tp",
                param="tp",
            )
        self._request, self._source = request, open_model_source(Path(request.path))
        self._dtype = self._source.compute_dtype(device)
        self._options = _draft_options(options, self._dtype)
        self._tokenizer = load_tokenizer(self._source, options, sandbox)
        require_same_vocabulary(
            target_tokenizer,
            self._tokenizer,
            target_name=target_source.path.stem,
            draft_name=request.name,
        )
        self._common_vocab_size = min(target_source.spec.vocab_size, self._source.spec.vocab_size)
        self._rank_model = RankModel(
            self._source, self._options, self._dtype, ModelShard(self._source.spec)
        )

    @property
    def weight_bytes(self) -> int:
        return self._rank_model.weight_bytes

    @property
    def work_bytes(self) -> int:
        """Working memory of a step in bytes, in addition to weights and KV cache."""
        return sizing.step_work_bytes(self._source.spec, self._options, self._dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return sizing.kv_bytes_per_token(self._source.spec, self._options.cache_dtype)

    def allocate_cache(self, size: KVSize) -> bool:
        """Allocate a KV cache of the target's size. See RankModel.allocate_cache."""
        return self._rank_model.allocate_cache(pages_for(size.kv_tokens), self._ctx(size))

    def start_runner(self, size: KVSize) -> LoadedDraftModel:
        """Create and warm up the runner. Requires allocate_cache."""
        kv_bytes = size.kv_tokens * self.kv_bytes_per_token
        info = DraftInfo(
            name=self._request.name,
            path=self._request.path,
            description=describe_model(self._source.spec, self._dtype),
            size_bytes=self.weight_bytes,
            ctx=self._ctx(size),
            kv_bytes=kv_bytes,
            work_bytes=self.work_bytes,
            memory=MemoryUsage(weights=self.weight_bytes, kv=kv_bytes),
        )
        runner = build_cuda_runner(
            self._source,
            self._options,
            self._tokenizer,
            self._rank_model.executor,
            replace(size, ctx=self._ctx(size)),
            run_ahead=False,  # the token after a draft depends on the target model
        )
        _warm_up(runner)
        return LoadedDraftModel(info, runner, self._common_vocab_size)

    def _ctx(self, size: KVSize) -> int:
        return min(size.ctx, self._source.spec.max_len)


def _draft_options(options: CudaOptions, dtype: torch.dtype) -> CudaOptions:
    """The target's options, with a KV cache of the draft model's dtype unless it is quantized."""
    if CACHE_DTYPES[options.cache_type_k] in (torch.float8_e4m3fn, torch.int8):
        return options
    return replace(
        options, cache_type_k=CACHE_DTYPE_NAMES[dtype], cache_type_v=CACHE_DTYPE_NAMES[dtype]
    )


def _warm_up(runner: CudaRunner) -> None:
    """Run one prompt and one decode step, so that their kernels are compiled."""
    params = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
    seq = Sequence(id="probe", tokens=[0] * 4, num_prompt=4, params=params, ctx=8, max_len=8)
    runner.admit(seq, spare=0)
    for start, tokens in ((0, [0] * 4), (4, [0])):
        chunk = Chunk(seq=seq, start=start, tokens=tokens, is_sampled=True)
        runner.grow(seq, len(tokens))
        runner.collect(runner.launch([chunk]))
        seq.tokens.append(0)
        seq.num_computed += len(tokens)
    runner.release(seq, keep=False)
