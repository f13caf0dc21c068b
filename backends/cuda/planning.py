"""What a model's steps launch, found by running them on the meta device, where nothing is computed.

A layer of each kind is enough: all others launch the same. Torch takes a second or more to get
ready for meta tensors, so this is for first starts only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from localgen.backends.cuda.batch import Ints, StepInputs, arrange, on_device
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.graphs import LEAST_LEN, Shape, pad
from localgen.backends.cuda.kernels.launch import Launch, planning
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.pages import pages_for
from localgen.backends.cuda.sampler import Row, choose
from localgen.backends.cuda.spec import ModelSpec
from localgen.backends.cuda.weights import random_weights
from localgen.backends.engine.runner import Chunk
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING

# one of every range within which launchers choose the same
_PROMPTS = (8, 16, 64, 128, 512, 2048)
_SEQUENCES = (1, 2, 4, 8, 16, 64, 256)
_META = torch.device("meta")


class Planner:
    """Lists what is launched on a GPU of this capability and with so many multiprocessors."""

    def __init__(
        self, spec: ModelSpec, options: Settings, dtype: torch.dtype, *, arch: int, units: int
    ) -> None:
        windows = tuple(dict.fromkeys(spec.windows))
        self._spec = replace(spec, layers=len(windows), windows=windows)
        self._options, self._dtype = options, dtype
        self._arch, self._units = arch, units

    def first(self) -> list[Launch]:
        """By the first answer: a prompt of any length, and one sequence that decodes."""
        most = min(self._options.max_batch_tokens, self._spec.max_len)
        prompts = [prompt_step(rows) for rows in _PROMPTS if rows <= most]
        penalized = replace(BASE_SAMPLING, temperature=1.0, repeat_last_n=64, repeat_penalty=1.1)
        return self._launched(
            [*prompts, decoding_step(1, LEAST_LEN)],
            [Row(BASE_SAMPLING, [0]), Row(penalized, [0])],
        )

    def later(self) -> list[Launch]:
        """By answers that get longer, and by many at once."""
        longest = min(self._options.ctx or self._spec.max_len, self._spec.max_len)
        lengths = [LEAST_LEN]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        steps = [
            decoding_step(sequences, length)
            for sequences in _SEQUENCES
            if sequences <= self._options.parallel
            for length in lengths
        ]
        # the end of a prompt whose beginning is in the cache
        steps += [prompt_step(_PROMPTS[0], before=length) for length in lengths]
        return self._launched(steps, [Row(BASE_SAMPLING, [0])])

    def _launched(self, steps: list[StepInputs], rows: list[Row]) -> list[Launch]:
        with planning(self._arch, self._units) as planned, torch.inference_mode():
            weights = random_weights(self._spec, device=_META, dtype=self._dtype, seed=0)
            decoder = Decoder(self._spec, weights, max_len=1)
            cache = KVCache.zeros(self._spec, 1, device=_META, dtype=self._options.cache_dtype)
            widths = set()
            for step in steps:
                logits = decoder.forward(on_device(step, _META), cache)
                widths.add(len(logits))
            for width in widths:
                for row in rows:
                    choose(torch.empty(width, self._spec.vocab, device=_META), [row] * width)
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
