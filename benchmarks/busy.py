"""Speed beside other work: localgen, llama-bench and llama-server beside 0, 1, 2 and 4 busy loops.

python -m benchmarks.busy [--tools DIR] [--quick] [--rounds N] [--model 1b|tiny|smollm2]
                          [--streams N …] [--prompt TOKENS]
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from benchmarks import llamacpp_tools, random_gguf
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.random_vocabulary import random_words
from benchmarks.servers import Localgen, llama_server, private_settings
from benchmarks.speed import BATCHED, BENCH, LOCALGEN, SERVER, UNIFIED
from benchmarks.streams import (
    HttpSpeaker,
    LocalgenSpeaker,
    Speaker,
    StreamFailed,
    decode_rate,
    together,
)
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions
from localgen.hub.packaged import packaged_model

CTX = 2048
PROMPT = "Once upon a time"
# targets: speed on an idle machine, beside one busy loop, and against the best fixed choice
QUIET, BESIDE_ONE, BEST = 0.98, 10.0, 0.8
# how the threads of GCC's OpenMP wait; the empty one is llama.cpp's default
WAITING: Mapping[str, Mapping[str, str]] = {
    "": {},
    " GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    " OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run this many processes that compute all the time."""
    with contextlib.ExitStack() as loops:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            loops.callback(process.wait)
            loops.callback(process.kill)
        yield


@dataclass(frozen=True, slots=True)
class Workload:
    """name: for the report. peer: llama.cpp's tool. ours, theirs: return tokens/s; theirs takes the
    number of threads and variables of the environment."""

    name: str
    peer: str
    ours: Callable[[Sequence[Speaker]], float]
    theirs: Callable[[int, Mapping[str, str]], float]


def workloads(
    tools: Tools, model: Path, tokens: int, streams: Sequence[int], prompt: int
) -> Iterator[Workload]:
    """Yield decoding of so many streams with `tokens` each, and a prompt of `prompt` tokens if it
    is not 0."""
    for count in streams:
        if count == 1:
            one = partial(tools.generation, model, tokens)
            yield Workload(f"tg{tokens}", BENCH, partial(_decode, count=1, tokens=tokens), one)
            continue

        def many(threads: int, variables: Mapping[str, str], count: int = count) -> float:
            found = tools.batched(
                model, 8, tokens, count, threads, unified=True, environment=variables
            )
            return found["speed_tg"]

        ours = partial(_decode, count=count, tokens=tokens)
        yield Workload(f"tg{tokens} × {count}", UNIFIED, ours, many)

    def read(threads: int, variables: Mapping[str, str]) -> float:
        found = tools.batched(model, prompt, 2, 1, threads, unified=True, environment=variables)
        return found["speed_pp"]

    if prompt:
        yield Workload(f"pp{prompt}", BATCHED, partial(_prefill, tokens=prompt), read)


def compare(
    report: Report, servers: Mapping[str, Sequence[Speaker]], workload: Workload, busy: int
) -> None:
    """Measure each engine while `busy` other processes compute.

    servers: clients of each, at least one per stream. Adds tokens/s and the ratios to their targets
    to the report.
    """
    shown = f"{workload.name} beside {busy}"
    sides = {name: partial(workload.ours, speakers) for name, speakers in servers.items()}
    for threads in sorted({1, num_physical_cores()}):
        for waiting, variables in WAITING.items():
            sides[f"{workload.peer} -t {threads}{waiting}"] = partial(
                workload.theirs, threads, variables
            )
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(report.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            with busy_loops(busy):
                rates[name].append(sides[name]())
            print(f"{shown}: {name}: {rates[name][-1]:.2f}", file=sys.stderr, flush=True)
    series = {name: report.add(shown, name, RATE, values) for name, values in rates.items()}
    default = series[f"{workload.peer} -t {num_physical_cores()}"]
    fixed = [one for name, one in series.items() if name not in servers]
    if busy < 2:
        report.ratio(series[LOCALGEN], default, (QUIET, BESIDE_ONE)[busy], at_least=True)
    report.ratio(series[LOCALGEN], max(fixed, key=lambda s: s.median), BEST, at_least=True)


def _decode(speakers: Sequence[Speaker], *, count: int, tokens: int) -> float:
    return decode_rate(together(speakers[:count], [PROMPT] * count, tokens))


def _prefill(speakers: Sequence[Speaker], *, tokens: int) -> float:
    answer = speakers[0].ask(random_words(tokens, secrets.token_hex(8)), 1)  # in no cache
    return (answer.prompt_tokens - answer.cached_tokens) / (answer.first_s - answer.sent_s)


def _model(name: str) -> Path:
    if name in random_gguf.SHAPES:
        return random_gguf.cached(random_gguf.SHAPES[name])
    return packaged_model(name).path


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; the status is 0 whether or not every target was met."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.busy")
    parser.add_argument("--tools", type=Path, help="folder with llama-bench and the other tools")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one short round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison")
    parser.add_argument("--model", choices=("1b", "tiny", "smollm2"), default="1b")
    parser.add_argument("--busy", type=int, nargs="+", default=(0, 1, 2, 4), help="busy loops")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--streams", type=int, nargs="+", default=(1,), help="streams at once")
    parser.add_argument("--prompt", type=int, default=0, help="also read a prompt of this length")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    try:
        tools = Tools(options.tools or llamacpp_tools.build())
        model = _model("quick" if options.quick else options.model)
        with private_settings() as settings:
            localgen = Localgen(settings, model, LoadOptions(ctx=CTX, draft="none"))
            info = localgen.info
            line = ModelLine(info.description, info.size_bytes, info.params)
            report = Report(line, rounds, options.quick, info.options.threads or 0, {"ctx": CTX})
            threads = num_physical_cores()
            with llama_server(
                tools, model, slots=max(options.streams), slot_ctx=CTX, threads=threads
            ) as http:
                clients = range(max(options.streams))
                servers: dict[str, list[Speaker]] = {
                    LOCALGEN: [LocalgenSpeaker(localgen.client(), localgen.model) for _ in clients],
                    SERVER: [HttpSpeaker(http) for _ in clients],
                }
                wanted = workloads(tools, model, options.tokens, options.streams, options.prompt)
                for workload in wanted:
                    for count in (0, 1) if options.quick else options.busy:
                        compare(report, servers, workload, count)
            localgen.close()
    except (ToolFailed, StreamFailed, LocalgenError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands += [command("benchmarks.busy", arguments), *tools.commands]
    print(report.text())
    report.save("busy", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
