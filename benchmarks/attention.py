"""Measure llama.cpp's step time with a filled KV cache, unified and split per sequence.

python -m benchmarks.attention: the figures in docs/cpu.md and docs/architecture.md for unified
cells, parts, copies and blocks of rows. A bare loop over the low-level API, without a scheduler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks import random_gguf
from benchmarks.measure import table
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.model_info import LoadOptions
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as Seq
from localgen.backends.sampling_params import SamplingParams

CROWDS = ((4, 200), (4, 1000), (4, 4000), (16, 200), (16, 1000))  # (sequences, tokens of each)
CONTEXTS = (400, 1600, 3900)
ROWS = (16, 32, 48, 64, 128)
_REPEATS = 5


class Cache:
    """A llama.cpp context whose sequences are filled and extended directly."""

    def __init__(self, model: LlamaModel, *, tokens: int, sequences: int, unified: bool) -> None:
        size = -(-tokens // 256) * 256
        options = replace(resolve_llama_options(LoadOptions()), kv_unified=unified)
        self.context = LlamaContext(model, options, kv_tokens=size * sequences, n_seq_max=sequences)
        self._batch = LlamaBatch(self.context.n_batch)
        self._seq = Seq(id="", tokens=[], num_prompt=0, params=SamplingParams(), ctx=0, max_len=0)

    def step(self, sequences: Sequence[int], start: int, rows: int) -> float:
        """Compute `rows` tokens of each sequence at position `start`; return milliseconds."""
        tokens = [5] * rows
        chunks = [
            Chunk(seq=self._seq, start=start, tokens=tokens, is_sampled=True) for _ in sequences
        ]
        self._batch.fill(chunks, sequences)
        begun = time.perf_counter()
        assert self.context.decode(self._batch.native).result() == 0
        return (time.perf_counter() - begun) * 1e3

    def fill(self, length: int) -> None:
        """Fill the first sequence with `length` tokens."""
        for start in range(0, length, self.context.n_batch):
            self.step([0], start, min(self.context.n_batch, length - start))


@contextmanager
def _cache(model: LlamaModel, tokens: int, sequences: int, *, unified: bool) -> Iterator[Cache]:
    cache = Cache(model, tokens=tokens + 256, sequences=sequences, unified=unified)
    yield cache
    cache.context.close()


def _median(measure: Callable[[], float]) -> float:
    measure()  # warm-up
    return statistics.median(measure() for _ in range(_REPEATS))


def crowd(model: LlamaModel, sequences: int, length: int, *, unified: bool) -> tuple[float, float]:
    """Return the ms of a decode step of all sequences, and of copying one sequence to another."""
    with _cache(model, length, sequences, unified=unified) as cache:
        cache.fill(length)
        copies = []
        for target in range(1, sequences):
            begun = time.perf_counter()
            cache.context.restore(target, cache.context.save(0))
            copies.append((time.perf_counter() - begun) * 1e3)
        everyone = range(sequences)

        def step() -> float:
            took = cache.step(everyone, length, 1)
            for sequence in everyone:
                cache.context.truncate(sequence, length)
            return took

        return _median(step), statistics.median(copies)


def rows(model: LlamaModel, length: int, counts: Sequence[int] = ROWS) -> list[float]:
    """Return the ms of a step at position `length`, for each number of rows."""
    with _cache(model, length, 1, unified=True) as cache:
        cache.fill(length)

        def step(count: int) -> float:
            took = cache.step([0], length, count)
            cache.context.truncate(0, length)
            return took

        return [_median(lambda count=count: step(count)) for count in counts]  # type: ignore[misc]


def main() -> None:
    """Run the benchmark and print the tables."""
    model = LlamaModel(
        random_gguf.cached(random_gguf.SHAPES["1b"]),
        resolve_llama_options(LoadOptions()),
        lambda _: None,
    )
    lines = []
    for sequences, length in CROWDS:
        unified, _ = crowd(model, sequences, length, unified=True)
        parts, copy = crowd(model, sequences, length, unified=False)
        shown = (f"{unified:.0f} ms", f"{parts:.0f} ms", f"{copy:.1f} ms")
        lines.append((f"{sequences} × {length:,}", *shown))
    print(table(("sequences × tokens each", "unified", "in parts", "copy"), lines))
    lengths = [
        (f"{length:,}", *(f"{ms:.0f} ms" for ms in rows(model, length))) for length in CONTEXTS
    ]
    print(table(("context", *(f"{count} rows" for count in ROWS)), lengths))


if __name__ == "__main__":
    main()
