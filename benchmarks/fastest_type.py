"""Speed of localgen in a fast type of the weights against llama.cpp's tools in Q4_K_M.

python -m benchmarks.fastest_type [--type iq4_nl] [--rounds N] [--streams 1 16]: figures of
docs/cpu.md. `localgen plan` measures which type is fast on a machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx

from benchmarks import llamacpp_tools, steps
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.servers import Localgen
from benchmarks.speed import BATCHED, BENCH, LOCALGEN
from benchmarks.streams import (
    LocalgenBenchClient,
    StreamFailed,
    decode_rate,
    submit_concurrently,
)
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions
from localgen.bench.private_server import private_settings

# the most common type, and the target against it
USUAL, TARGET = "q4_k_m", 1.3
CTX = 512


def compare(report: Report, tools: Tools, models: dict[str, Path], count: int, tokens: int) -> None:
    """Add the decode rate of `count` streams in each type, of both programs, to the report.

    models: a file per type. localgen with the last type is compared with the tool with the first.
    """
    sides: dict[str, Callable[[], float]] = {}
    for name, path in models.items():
        sides[f"{LOCALGEN}, {name}"] = partial(_localgen, path, count, tokens)
        sides[f"{BENCH if count == 1 else BATCHED}, {name}"] = partial(
            _tool, tools, path, count, tokens
        )
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(report.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            rates[name].append(sides[name]())
            print(f"{count}: {name}: {rates[name][-1]:.2f}", file=sys.stderr, flush=True)
    test = f"tg{tokens} × {count}"
    series = [report.add(test, name, RATE, values) for name, values in rates.items()]
    report.ratio(series[-2], series[1], TARGET, at_least=True)


def _localgen(model: Path, count: int, tokens: int) -> float:
    """Decode rate of a new server with a split KV cache."""
    options = LoadOptions(ctx=CTX, parallel=count, draft="none")
    with private_settings() as settings:
        server = Localgen(settings, model, options)
        clients = [LocalgenBenchClient(server.client(), server.model) for _ in range(count)]
        submit_concurrently(clients, ["ab"] * count, 8)  # warm-up; the tools do their own
        rate = decode_rate(submit_concurrently(clients, ["Once upon a time"] * count, tokens))
        server.close()
    return rate


def _tool(tools: Tools, model: Path, count: int, tokens: int) -> float:
    if count == 1:
        return tools.generation(model, tokens, num_physical_cores())
    found = tools.batched(model, 8, tokens, count, num_physical_cores(), unified=False)
    return found["speed_tg"]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.fastest_type")
    fast = [name for name in steps.TYPES if name != USUAL]
    parser.add_argument("--tools", type=Path, help="folder with llama-bench and the other tools")
    parser.add_argument("--type", choices=fast, default="iq4_nl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16), help="streams at once")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    try:
        tools = Tools(options.tools or llamacpp_tools.build())
        models = {name: steps.cached(name) for name in (USUAL, options.type)}
        size = models[options.type].stat().st_size
        line = ModelLine(f"random 1.24 B, {' and '.join(models)}", size, 1_235_814_400)
        threads = num_physical_cores()
        report = Report(line, options.rounds, False, threads, {"ctx": CTX})
        for count in options.streams:
            compare(report, tools, models, count, options.tokens)
    except (ToolFailed, StreamFailed, LocalgenError, RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands += [command("benchmarks.fastest_type", arguments), *tools.commands]
    print(report.text())
    report.save("fastest-type", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
