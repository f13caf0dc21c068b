"""Speed beside other work: localgen, llama-bench and llama-server beside 0, 1, 2 and 4 busy loops.

python -m benchmarks.busy [--tools DIR] [--quick] [--rounds N] [--model 1b|tiny|smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx

from benchmarks import llamacpp_tools, random_gguf
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.servers import Localgen, llama_server, private_settings
from benchmarks.speed import BENCH, LOCALGEN, SERVER
from benchmarks.streams import HttpSpeaker, LocalgenSpeaker, Speaker, StreamFailed, decode_rate
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


def compare(
    report: Report,
    servers: Mapping[str, Speaker],
    tools: Tools,
    model: Path,
    busy: int,
    tokens: int,
) -> None:
    """Measure the decode speed of each engine while `busy` other processes compute.

    Adds tokens/s and the ratios to their targets to the report. tokens: of each answer.
    """
    test = f"tg{tokens} beside {busy}"
    sides = {name: partial(_generation, speaker, tokens) for name, speaker in servers.items()}
    for threads in sorted({1, num_physical_cores()}):
        for waiting, variables in WAITING.items():
            name = f"{BENCH} -t {threads}{waiting}"
            sides[name] = partial(tools.generation, model, tokens, threads, variables)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(report.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            with busy_loops(busy):
                rates[name].append(sides[name]())
            print(f"{test}: {name}: {rates[name][-1]:.2f}", file=sys.stderr, flush=True)
    series = {name: report.add(test, name, RATE, values) for name, values in rates.items()}
    default = series[f"{BENCH} -t {num_physical_cores()}"]
    fixed = [one for name, one in series.items() if name not in servers]
    if busy < 2:
        report.ratio(series[LOCALGEN], default, (QUIET, BESIDE_ONE)[busy], at_least=True)
    report.ratio(series[LOCALGEN], max(fixed, key=lambda s: s.median), BEST, at_least=True)


def _generation(speaker: Speaker, tokens: int) -> float:
    return decode_rate([speaker.ask(PROMPT, tokens)])


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
            with llama_server(tools, model, slots=1, slot_ctx=CTX, threads=threads) as http:
                servers: dict[str, Speaker] = {
                    LOCALGEN: LocalgenSpeaker(localgen.client(), localgen.model),
                    SERVER: HttpSpeaker(http),
                }
                for count in (0, 1) if options.quick else options.busy:
                    compare(report, servers, tools, model, count, options.tokens)
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
