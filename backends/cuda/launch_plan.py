"""List the kernel launches of a model by running its steps on the meta device.

One layer of each kind is enough, because all others launch the same kernels. Torch takes a second
or more to initialize meta tensors, so this runs only when kernels have to be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kernels.decode_inputs import advance_decode_inputs
from localgen.backends.cuda.kernels.launch import KernelLaunch, record_launches
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.batch import (
    Int32Array,
    StepInputs,
    build_step_inputs,
    inputs_to_device,
)
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.process_group import TensorParallelGroup
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.steps.cuda_graphs import (
    CAPTURE_ROWS,
    MIN_GRAPH_LEN,
    graph_shape,
    pad_inputs,
)
from localgen.backends.cuda.steps.sampler import SamplingRow, sample_rows, sample_with_probs
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.memory.compute_buffers import MAX_MULTI_ROW_SEQS
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

# one value of each range in which the launchers choose the same kernel variant
_PROMPT_LENGTHS = (8, 16, 32, 64, 128, 256, 512, 2048)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# shortest length that attention splits; steps without a graph are not padded to MIN_GRAPH_LEN
_MIN_SPLIT_LEN = 64
_META = torch.device("meta")


class FakeTensorParallelGroup(TensorParallelGroup):
    """A group without communication: on the meta device only shapes matter."""

    __slots__ = ()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_logits(self, logits: Tensor) -> Tensor:
        return logits.new_empty(len(logits), self.shard.spec.vocab_size)


class LaunchPlanner:
    """Lists the kernel launches of one rank.

    arch, num_sms: the GPU's compute capability and number of multiprocessors.
    """

    def __init__(
        self,
        shard: ModelShard,
        options: CudaOptions,
        dtype: torch.dtype,
        *,
        arch: int,
        num_sms: int,
    ) -> None:
        windows = tuple(dict.fromkeys(shard.spec.sliding_windows))
        spec = replace(shard.spec, num_layers=len(windows), sliding_windows=windows)
        self._shard = replace(shard, spec=spec)
        self._options, self._dtype = options, dtype
        self._arch, self._num_sms = arch, num_sms

    def first_answer_launches(self) -> list[KernelLaunch]:
        """Launches of the first answer: prompts of any length, and decode of one sequence."""
        most = min(self._options.max_batch_tokens, self._shard.spec.max_len)
        prompts = [prefill_inputs(rows) for rows in _PROMPT_LENGTHS if rows <= most]
        decoding = [decode_inputs(1, MIN_GRAPH_LEN)]
        penalized = replace(BASE_SAMPLING, temperature=1.0, repeat_last_n=64, repeat_penalty=1.1)
        return self._record_launches(
            [*prompts, *decoding], [SamplingRow(BASE_SAMPLING, [0]), SamplingRow(penalized, [0])]
        )

    def later_launches(self) -> list[KernelLaunch]:
        """Launches of sampled drafts, longer answers and larger batches."""
        sizes = [n for n in _BATCH_SIZES if n <= self._options.parallel]
        lengths = self._lengths(MIN_GRAPH_LEN)
        steps = [decode_inputs(n, length) for n in sizes for length in lengths]
        steps += [  # verification of drafts
            decode_inputs(n, length, rows)
            for n in sizes
            for length in (lengths if n <= MAX_MULTI_ROW_SEQS else self._lengths(_MIN_SPLIT_LEN))
            for rows in (CAPTURE_ROWS[0], CAPTURE_ROWS[-1])
        ]
        # prefill beside a decoding sequence
        steps += [mixed_inputs(length) for length in self._lengths(_MIN_SPLIT_LEN)]
        # prefill after a cached prefix, which attention splits if the prompt is short
        steps += [
            prefill_inputs(rows, num_cached=length)
            for rows in _PROMPT_LENGTHS[:5]
            for length in lengths
        ]
        launches = self._record_launches(steps, [SamplingRow(BASE_SAMPLING, [0])])
        launches = [*self._draft_sampling_launches(), *launches, *self._advance_launches()]
        return list(unique_launches(launches))

    def _draft_sampling_launches(self) -> list[KernelLaunch]:
        """Launches that sample a draft and verify it, here of the same model."""
        with record_launches(self._arch, self._num_sms) as planned, torch.inference_mode():
            logits = torch.empty(1, self._shard.spec.vocab_size, device=_META)
            _, probs = sample_with_probs(logits, [SamplingRow(BASE_SAMPLING, [0])], [0])
            sample_rows(logits, [SamplingRow(BASE_SAMPLING, [0], draft_probs=probs[0])])
        return planned.launches

    def _advance_launches(self) -> list[KernelLaunch]:
        """Launches that make the inputs of a decode step on the device; not with several ranks."""
        if self._shard.tp_size > 1:
            return []
        with record_launches(self._arch, self._num_sms) as planned:
            inputs = inputs_to_device(decode_inputs(1, MIN_GRAPH_LEN), _META).decode_inputs
            tokens = torch.empty(1, dtype=torch.int64, device=_META)
            for pages in (None, torch.empty(1, dtype=torch.int32, device=_META)):
                advance_decode_inputs(inputs, tokens, pages, PAGE_TOKENS)
        return planned.launches

    def _lengths(self, shortest: int) -> list[int]:
        """Powers of two from `shortest` to the first one not below the context."""
        trained, lengths = self._shard.spec.max_len, [shortest]
        while lengths[-1] < min(self._options.ctx or trained, trained):
            lengths.append(2 * lengths[-1])
        return lengths

    def _record_launches(
        self, steps: list[StepInputs], rows: list[SamplingRow]
    ) -> list[KernelLaunch]:
        local = self._shard.local_spec
        with record_launches(self._arch, self._num_sms) as planned, torch.inference_mode():
            weights = random_weights(local, device=_META, dtype=self._dtype, seed=0)
            decoder = Decoder(local, weights, max_len=1, group=FakeTensorParallelGroup(self._shard))
            cache = KVCache.zeros(local, 1, device=_META, dtype=self._options.cache_dtype)
            widths = set()
            for step in steps:
                logits = decoder.forward(inputs_to_device(step, _META), cache)
                widths.add(len(logits))
            for width in widths:
                for row in rows:
                    sample_rows(
                        torch.empty(width, self._shard.spec.vocab_size, device=_META), [row] * width
                    )
        return list(unique_launches(planned.launches))


def unique_launches(launches: list[KernelLaunch]) -> Iterator[KernelLaunch]:
    """Yield each distinct launch once."""
    seen = set()
    for launch in launches:
        key = (launch.kernel, launch.args, tuple(sorted(launch.options.items(), key=str)))
        if key not in seen:
            seen.add(key)
            yield launch


def prefill_inputs(rows: int, *, num_cached: int = 0) -> StepInputs:
    """Inputs of a prefill step of `rows` tokens after `num_cached` computed ones."""
    return build_step_inputs([_chunk(num_cached, rows)], _page_table)


def decode_inputs(num_seqs: int, length: int, rows: int = 1) -> StepInputs:
    """Inputs of a step of `rows` tokens of each sequence, padded as by DeviceExecutor."""
    chunks = [_chunk(length - rows, rows) for _ in range(num_seqs)]
    inputs = build_step_inputs(chunks, _page_table)
    shape = graph_shape(inputs)
    return inputs if shape is None else pad_inputs(inputs, shape)


def mixed_inputs(length: int) -> StepInputs:
    """Inputs of a step of one token of a sequence of this length, and a short prompt."""
    return build_step_inputs([_chunk(length - 1, 1), _chunk(0, _PROMPT_LENGTHS[1])], _page_table)


def _chunk(start: int, rows: int) -> Chunk:
    length = start + rows
    seq = Sequence(id="", tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=length, max_len=length)
    return Chunk(seq=seq, start=start, tokens=[0] * rows, is_sampled=True)


def _page_table(seq: Sequence) -> Int32Array:
    return np.zeros(pages_for(seq.ctx), np.int32)
