"""Measure llama.cpp's step time with a filled KV cache, shared and split.

python -m benchmarks.attention [--quick] [--output FILE]: figures of docs/cpu.md for both layouts,
copies of a prefix and blocks of rows. A bare loop over the low-level API, without a scheduler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import random_gguf
from benchmarks.measure import ModelLine, Report, command, table
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.model_info import LoadOptions
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as Seq
from localgen.backends.sampling_params import SamplingParams

REPEATS = 5


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Sizes of the tests. batches: (sequences, tokens of each). contexts, rows: of one sequence."""

    shape: str
    batches: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]


FULL = AttentionPlan(
    "1b",
    ((4, 200), (4, 1000), (4, 4000), (16, 200), (16, 1000)),
    (400, 1600, 3900),
    (16, 32, 48, 64, 128),
)
QUICK = AttentionPlan("quick", ((2, 100),), (100,), (1, 2))


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


def _repeated(measure: Callable[[], float]) -> list[float]:
    measure()  # warm-up
    return [measure() for _ in range(REPEATS)]


def decode_and_copy_ms(
    model: LlamaModel, sequences: int, length: int, *, unified: bool
) -> tuple[list[float], list[float]]:
    """Return the ms of each decode step of all sequences, and of each copy of a sequence."""
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

        return _repeated(step), copies


def step_ms(model: LlamaModel, length: int, counts: Sequence[int]) -> list[list[float]]:
    """Return the ms of each step at position `length`, for each number of rows."""
    with _cache(model, length, 1, unified=True) as cache:
        cache.fill(length)

        def step(count: int) -> float:
            took = cache.step([0], length, count)
            cache.context.truncate(0, length)
            return took

        return [_repeated(lambda count=count: step(count)) for count in counts]  # type: ignore[misc]


def measure(report: Report, model: LlamaModel, plan: AttentionPlan) -> str:
    """Add all times to the report; return the tables of their medians."""
    batches = [_batch(report, model, *batch) for batch in plan.batches]
    contexts = [_context(report, model, length, plan.rows) for length in plan.contexts]
    rows = (f"{count} rows" for count in plan.rows)
    tables = (
        table(("sequences × tokens each", "shared", "split", "copy"), batches),
        table(("context", *rows), contexts),
    )
    return "\n".join(tables)


def _batch(report: Report, model: LlamaModel, sequences: int, length: int) -> tuple[str, ...]:
    """Measure a batch with both layouts; return its row of the table."""
    name = f"{sequences} × {length:,}"
    shared_ms, _ = decode_and_copy_ms(model, sequences, length, unified=True)
    split_ms, copy_ms = decode_and_copy_ms(model, sequences, length, unified=False)
    shared = report.add(f"decode step, {name} tokens", "shared", "ms", shared_ms)
    split = report.add(f"decode step, {name} tokens", "split", "ms", split_ms)
    copy = report.add(f"copy of a sequence, {name} tokens", "split", "ms", copy_ms)
    return name, f"{shared.median:.0f} ms", f"{split.median:.0f} ms", f"{copy.median:.1f} ms"


def _context(
    report: Report, model: LlamaModel, length: int, rows: Sequence[int]
) -> tuple[str, ...]:
    """Measure steps of each number of rows; return the row of the table."""
    times_ms = zip(rows, step_ms(model, length, rows), strict=True)
    test = f"step after {length:,} tokens"
    series = [report.add(test, f"{count} rows", "ms", each_ms) for count, each_ms in times_ms]
    return f"{length:,}", *(f"{one.median:.0f} ms" for one in series)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.attention")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short contexts")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    load_options = resolve_llama_options(LoadOptions())
    model = LlamaModel(
        random_gguf.cached(random_gguf.SHAPES[plan.shape]), load_options, lambda _: None
    )
    line = ModelLine(f"random {plan.shape}", model.size_bytes, model.num_params)
    report = Report(line, REPEATS, options.quick, load_options.threads, {})
    report.commands.append(command("benchmarks.attention", arguments))
    print(measure(report, model, plan))
    report.save("attention", options.output)
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
