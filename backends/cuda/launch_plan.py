"""What a model's steps launch, found by running them on the meta device, where nothing is computed.

A layer of each kind is enough: all others launch the same. Torch takes a second or more to get
ready for meta tensors, so this is for first starts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.device.options import Settings
from localgen.backends.cuda.kernels.launch import Launch, planning
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import Ints, StepInputs, arrange, on_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.process_group import Ranks
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.steps.cuda_graphs import LEAST_LEN, Shape, pad
from localgen.backends.cuda.steps.sampler import Row, choose
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING

# one of every range within which launchers choose the same
_PROMPTS = (8, 16, 64, 128, 512, 2048)
_SEQUENCES = (1, 2, 4, 8, 16, 64, 256)
# the shortest that attention divides: steps of several ranks are not padded to LEAST_LEN
_LEAST_DIVIDED = 128
_META = torch.device("meta")


class AbsentRanks(Ranks):
    """Nobody is asked: on the meta device only shapes matter."""

    __slots__ = ()

    def sum(self, x: Tensor) -> Tensor:
        """As Ranks.sum."""
        return x

    def whole(self, logits: Tensor) -> Tensor:
        """As Ranks.whole."""
        return logits.new_empty(len(logits), self.shard.spec.vocab)


class Planner:
    """Lists what a rank launches on a GPU of this capability and with so many multiprocessors."""

    def __init__(
        self, shard: Shard, options: Settings, dtype: torch.dtype, *, arch: int, units: int
    ) -> None:
        windows = tuple(dict.fromkeys(shard.spec.windows))
        spec = replace(shard.spec, layers=len(windows), windows=windows)
        self._shard = replace(shard, spec=spec)
        self._options, self._dtype = options, dtype
        self._arch, self._units = arch, units

    def first(self) -> list[Launch]:
        """By the first answer: a prompt of any length, and one sequence that decodes."""
        most = min(self._options.max_batch_tokens, self._shard.spec.max_len)
        prompts = [prompt_step(rows) for rows in _PROMPTS if rows <= most]
        decoding = [decoding_step(1, length) for length in self._lengths(LEAST_LEN)]
        penalized = replace(BASE_SAMPLING, temperature=1.0, repeat_last_n=64, repeat_penalty=1.1)
        return self._launched([*prompts, *decoding], [Row(BASE_SAMPLING, [0]), Row(penalized, [0])])

    def later(self) -> list[Launch]:
        """By answers that get longer, and by many at once."""
        longest = self._shard.spec.max_len
        lengths = self._lengths(min(self._options.ctx or longest, longest))
        steps = [
            decoding_step(sequences, length)
            for sequences in _SEQUENCES
            if sequences <= self._options.parallel
            for length in lengths
        ]
        # the end of a prompt whose beginning is in the cache
        steps += [prompt_step(_PROMPTS[0], before=length) for length in lengths]
        return self._launched(steps, [Row(BASE_SAMPLING, [0])])

    def _lengths(self, longest: int) -> list[int]:
        """Powers of two that a step may be padded to, the last not below longest."""
        lengths = [LEAST_LEN if self._shard.size == 1 else _LEAST_DIVIDED]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        return lengths

    def _launched(self, steps: list[StepInputs], rows: list[Row]) -> list[Launch]:
        local = self._shard.local
        with planning(self._arch, self._units) as planned, torch.inference_mode():
            weights = random_weights(local, device=_META, dtype=self._dtype, seed=0)
            decoder = Decoder(local, weights, max_len=1, ranks=AbsentRanks(self._shard))
            cache = KVCache.zeros(local, 1, device=_META, dtype=self._options.cache_dtype)
            widths = set()
            for step in steps:
                logits = decoder.forward(on_device(step, _META), cache)
                widths.add(len(logits))
            for width in widths:
                for row in rows:
                    choose(torch.empty(width, self._shard.spec.vocab, device=_META), [row] * width)
        return list(unique(planned.launches))


def unique(launches: list[Launch]) -> Iterator[Launch]:
    """Each that differs from those before."""
    seen = set()
    for launch in launches:
        key = (launch.kernel, launch.args, tuple(sorted(launch.options.items(), key=str)))
        if key not in seen:
            seen.add(key)
            yield launch


def prompt_step(rows: int, *, before: int = 0) -> StepInputs:
    """A prompt of so many tokens, after so many that are computed."""
    return arrange([_chunk(before, rows)], _table)


def decoding_step(sequences: int, length: int) -> StepInputs:
    """One token of each sequence, padded as DeviceSteps does."""
    step = arrange([_chunk(length - 1, 1) for _ in range(sequences)], _table)
    return pad(step, Shape(sequences, length))


def _chunk(start: int, rows: int) -> Chunk:
    length = start + rows
    seq = Sequence(id="", tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=length, limit=length)
    return Chunk(seq=seq, start=start, tokens=[0] * rows, samples=True)


def _table(seq: Sequence) -> Ints:
    return np.zeros(pages_for(seq.ctx), np.int32)
