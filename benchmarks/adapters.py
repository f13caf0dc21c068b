"""LoRA adapters over one loaded model: memory and speed, next to the model without them.

`memory`: resident memory of a process with the model, then with one and two adapters, then with the
model once more, as merged weights would need. `speed`: six answers at once, without adapters, with
one, and two answers each without, with one and with another: the longest time between two tokens
of an answer shows what waiting for the other adapters costs.

python -m benchmarks.adapters [--model smollm2] [--rank 16] [--rounds 5] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.random_adapter import write_for_gguf
from localgen.backends.adapters import AdapterRef
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Request, StepEvents
from localgen.hub.resolve import resolve_model

STREAMS, CTX = 6, 2048
PROMPT = "Once upon a time, in a house by the sea, there lived"


class Streams:
    """An engine in this process, and when the tokens of each answer came."""

    def __init__(self, model: LoadedModel) -> None:
        self._engine = Engine(
            model.runner,
            InputProcessor(
                limits=model.runner.limits,
                tokenizer=model.tokenizer,
                template=model.template,
                defaults=model.info.sampling,
                read_adapter=model.read_adapter,
            ),
            itl_target_ms=2000.0,
            max_queue=100,
            publish=self._take,
        )
        self._times_s: dict[str, list[float]] = {}
        self._running: set[str] = set()
        self._count = itertools.count()

    def _take(self, events: StepEvents) -> None:
        now_s = time.perf_counter()
        for delta in events.deltas:
            self._times_s[delta.request_id].append(now_s)
        assert not events.failed, events.failed
        self._running -= {end.request_id for end in events.finished}

    def run(self, sets: Sequence[tuple[AdapterRef, ...]], tokens: int) -> tuple[float, float]:
        """Answer a prompt with each of these at once; return tokens per s and the longest gap in s.

        The time counts from the moment at which all have begun.
        """
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        names = [f"r{next(self._count)}" for _ in sets]
        self._times_s = {name: [] for name in names}
        self._running = set(names)
        for name, used in zip(names, sets, strict=True):
            self._engine.submit(Request(id=name, prompt=PROMPT, params=params, adapters=used))
        while self._running:
            self._engine.step(wait=True)
        begun_s = max(times[0] for times in self._times_s.values())
        ended_s = max(times[-1] for times in self._times_s.values())
        after = sum(time_s > begun_s for times in self._times_s.values() for time_s in times)
        gaps = [b - a for times in self._times_s.values() for a, b in itertools.pairwise(times)]
        return after / (ended_s - begun_s), max(gaps)


def load(path: Path) -> LoadedModel:
    options = LoadOptions(ctx=CTX, kv_tokens=CTX * 2, kv_ram=0, kv_disk=0, draft="none")
    return load_llamacpp_model(ModelLoadRequest("model", str(path), options), lambda _: None)


def rss_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def measure(path: Path, adapters: list[AdapterRef], report: Report, tokens: int) -> None:
    base: tuple[AdapterRef, ...] = ()
    one, other = (adapters[0],), (adapters[1],)
    before = rss_mb()
    streams = Streams(load(path))
    streams.run([base], 4)
    whole = rss_mb() - before
    report.add("memory", "the model", "MB", [whole])
    for side, used in (("with one adapter", one), ("with two adapters", other)):
        streams.run([used], 4)
        report.add("memory", side, "MB", [rss_mb() - before])
    added = rss_mb() - before - whole
    second = load(path)
    report.add("memory", "with the model twice", "MB", [rss_mb() - before])
    second.runner.close()
    share = report.add("memory", "two adapters ÷ the model", "", [added / whole])
    report.most(share, 0.25)
    sides: dict[str, list[tuple[AdapterRef, ...]]] = {
        "no adapter": [base] * STREAMS,
        "one adapter": [one] * STREAMS,
        "none, one, another": [base, one, other] * (STREAMS // 3),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    longest_ms: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(report.rounds):
        for side, sets in sides.items():
            rate, gap_s = streams.run(sets, tokens)
            rates[side].append(rate)
            longest_ms[side].append(gap_s * 1e3)
    test = f"{STREAMS} answers"
    found = {side: report.add(test, side, RATE, values) for side, values in rates.items()}
    for side, values in longest_ms.items():
        report.add(f"{test}: longest gap", side, "ms", values)
    report.ratio(found["one adapter"], found["no adapter"], 0.7, at_least=True)
    report.ratio(found["none, one, another"], found["one adapter"], 0.4, at_least=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    path = resolve_model(args.model).path
    rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as folder:
        adapters = []
        for seed in (1, 2):
            file = Path(folder) / f"{seed}.gguf"
            write_for_gguf(file, path, seed, args.rank)
            adapters.append(AdapterRef(f"a{seed}", str(file)))
        info = load(path)
        line = ModelLine(args.model, info.info.size_bytes, info.info.params)
        threads = info.info.options.threads or 0
        info.runner.close()
        report = Report(line, rounds, args.quick, threads, {"ctx": CTX, "kv_tokens": 2 * CTX})
        report.commands.append(command("benchmarks.adapters", None))
        measure(path, adapters, report, 16 if args.quick else 48)
    print(report.text())
    report.save("adapters", args.output)


if __name__ == "__main__":
    main()
