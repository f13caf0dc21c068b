"""What saving prefixes costs the requests that run meanwhile, as a share of time.

    python -m benchmarks.saving_cost [--model 1b] [--tokens 4096] [--answer 256] [--output FILE]

`beside`: an answer is decoded while a prefix is saved block by block; the share of its time that
copying blocks takes the engine, and the CPU time of the thread that writes them, as a share of one
core. It writes at once here; usually it waits until the engine is idle, or 128 MiB wait.
`eviction`: beside an answer, a new prompt takes the room of a prefix of which nothing is saved; the
time that saving takes then, beside the time that computing took, for each token.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import random_gguf
from benchmarks.measure import ModelLine, Report, command
from benchmarks.session import Session
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.errors import LocalgenError
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.store import MIN_PREFIX_TOKENS
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.shared_cache import SharedCache
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.hub.packaged import packaged_model

MAX_PERCENT = 2.0
_TIER_BYTES = 4 << 30
_SPARE = 256
_QUESTION = 64


@dataclass(slots=True)
class TimedCalls:
    """Time spent in a method."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started_s = self.clock()
            try:
                return call(*args)
            finally:
                self.seconds += self.clock() - started_s

        return timed


@dataclass(frozen=True, slots=True)
class BesideAnswer:
    """Saving beside an answer. copying, writing: time of the engine and CPU time of the writer, as
    shares of the answer's time."""

    copying: float
    writing: float
    saved_tokens: int


class SavingBench:
    """An engine in this thread, with a KV cache for one long prefix and a chat."""

    def __init__(self, path: Path, tokens: int, answer: int, folder: str) -> None:
        self.tokens, self.answer = tokens, answer
        kv_tokens = tokens + answer + _SPARE
        options = LoadOptions(
            ctx=kv_tokens, kv_tokens=kv_tokens, kv_ram=_TIER_BYTES, kv_disk=_TIER_BYTES
        )
        request = ModelLoadRequest(
            "model", str(path), replace(options, draft="none"), kv_dir=folder
        )
        model = load_llamacpp_model(request, lambda _: None)
        self.info, self.store = model.info, model.prefix_store
        assert self.store is not None
        self.store.hurry()
        assert isinstance(model.runner.kv_cache, SharedCache)  # type: ignore[attr-defined]
        self.cache: SharedCache = model.runner.kv_cache  # type: ignore[attr-defined]
        self.session = Session(model.runner, 1000, itl_target_ms=100.0, prefix_store=self.store)
        self._random = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        """A new prompt, which no stored prefix matches."""
        return [self._random.randrange(100, 1000) for _ in range(tokens)]

    @property
    def saved_tokens(self) -> int:
        assert self.store is not None
        return sum(len(block.tokens) for block in self.store._ram._blocks.values())

    def beside(self) -> BesideAnswer:
        """An answer, while a prefix is saved."""
        self.session.ask([self.prompt(self.tokens)], 1)
        before, copies, writes = self.saved_tokens, TimedCalls(), TimedCalls(time.thread_time)
        with (
            patch.object(PrefixTiers, "save_while_busy", copies.wrap(PrefixTiers.save_while_busy)),
            patch.object(DiskTier, "write", writes.wrap(DiskTier.write)),
        ):
            (answer,) = self.session.ask([self.prompt(_QUESTION)], self.answer)
        took_s = answer.arrivals[-1][0] - answer.arrivals[0][0]
        saved = self.saved_tokens - before
        return BesideAnswer(copies.seconds / took_s, writes.seconds / took_s, saved)

    def eviction(self) -> tuple[float, float, int]:
        """Seconds to compute a prefix, to save what is evicted, and the tokens saved."""
        calls = TimedCalls()
        with (
            patch.object(PrefixTiers, "save_while_busy", lambda _: None),
            patch.object(SharedCache, "_save", calls.wrap(SharedCache._save)),
        ):
            started_s = time.perf_counter()
            self.session.ask([self.prompt(self.tokens)], 1)
            computed_s = time.perf_counter() - started_s
            before, calls.seconds = self.saved_tokens, 0.0
            chat = self.session.submit(self.prompt(_QUESTION), self.answer)
            while not chat.arrivals:
                self.session.step()
            self.session.ask([self.prompt(self.tokens)], 1)
            self.session.cancel([chat])
        return computed_s, calls.seconds, self.saved_tokens - before


def measured(bench: SavingBench, rounds: int, line: ModelLine) -> Report:
    """All figures of the rounds."""
    report = Report(
        line,
        rounds,
        False,
        bench.info.options.threads or 0,
        {"kv_ram": _TIER_BYTES, "kv_disk": _TIER_BYTES},
    )
    answers: list[BesideAnswer] = []
    evictions: list[tuple[float, float, int]] = []
    for _ in range(rounds):
        answers.append(bench.beside())
        evictions.append(bench.eviction())
        print(answers[-1], file=sys.stderr, flush=True)
    test = f"prefix of {bench.tokens:,} tokens"
    name = f"{test}, saved beside an answer"
    report.add(name, "saved", "tokens", [float(each.saved_tokens) for each in answers])
    report.add(name, "copying, share of time", "%", [100 * each.copying for each in answers])
    report.add(name, "writing, share of a core", "%", [100 * each.writing for each in answers])
    both = [100 * (each.copying + each.writing) for each in answers]
    report.most(report.add(name, "both", "%", both), MAX_PERCENT)
    name = f"{test}, evicted beside an answer"
    report.add(name, "computed", "s", [each[0] for each in evictions])
    report.add(name, "saved", "s", [each[1] for each in evictions])
    report.add(name, "saved", "tokens", [float(each[2]) for each in evictions])
    ratios = [
        100 * (saved_s / saved) / (computed_s / bench.tokens)
        for computed_s, saved_s, saved in evictions
    ]
    part = report.add(name, "saving ÷ computing, per token", "%", ratios)
    report.most(part, MAX_PERCENT)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving_cost")
    parser.add_argument("--model", choices=("1b", "tiny", "smollm2"), default="1b")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix; default: 4096")
    parser.add_argument("--answer", type=int, default=256, help="its tokens; default: 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.tokens < MIN_PREFIX_TOKENS or min(options.answer, options.rounds) < 1:
        parser.error(f"--tokens: at least {MIN_PREFIX_TOKENS}; --answer and --rounds: at least 1")
    shape = random_gguf.SHAPES.get(options.model)
    try:
        path = random_gguf.cached(shape) if shape else packaged_model(options.model).path
        with tempfile.TemporaryDirectory() as folder:
            bench = SavingBench(path, options.tokens, options.answer, folder)
            info = bench.info
            line = ModelLine(info.description, info.size_bytes, info.params)
            # nothing is saved in the pauses, of which a user's chat has more
            with bench.session, patch.object(PrefixTiers, "prepare", lambda _: False):
                report = measured(bench, options.rounds, line)
    except LocalgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands.append(command("benchmarks.saving_cost", arguments))
    print(report.text())
    report.save("saving-cost", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
