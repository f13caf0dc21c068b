"""`localgen bench` beside llama-bench, in turn: are its pp512 and tg128 the same?

python -m benchmarks.bench [--tools DIR] [--model 1b|tiny|smollm2] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
from math import inf
from pathlib import Path

from benchmarks import llamacpp_tools
from benchmarks.busy import named_model
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, command
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions
from localgen.bench.measured_request import Target
from localgen.bench.private_server import private_settings
from localgen.bench.prompts import WordPrompts
from localgen.bench.suite import PP, TG, SuiteRunner, plain_tests
from localgen.client import LocalClient

OURS, THEIRS = "localgen bench", "llama-bench"
# of the other's figure, in the median of the rounds
TARGET = 0.95


def measure(tools: Tools, model: Path, rounds: int) -> Report:
    """Alternate both programs. localgen's server stays loaded, and is idle during the other's."""
    threads = num_physical_cores()
    with private_settings() as settings, LocalClient(settings) as client:
        client.connect()
        info = client.load(
            str(model), LoadOptions(draft="none", prefix_cache=False, threads=threads)
        )
        line = ModelLine(info.description, info.size_bytes, info.params)
        report = Report(line, rounds, False, threads, {})
        runner = SuiteRunner(Target(client, str(model), info.ctx), WordPrompts(1))
        runner.warm_up()
        tests = {test.name: test for test in plain_tests() if test.name in (PP, TG)}
        theirs: dict[str, list[float]] = {PP: [], TG: []}
        for number in range(rounds):
            for name, test in tests.items():
                runner.run([test], inf, num_cycles=1)
                tool = tools.prefill if name == PP else tools.generation
                theirs[name].append(tool(model, 512 if name == PP else 128, threads))
                print(f"{number}: {name}: {test.rates[-1]:.2f}, {theirs[name][-1]:.2f}", flush=True)
        for name, test in tests.items():
            ours = report.add(name, OURS, RATE, test.rates)
            other = report.add(name, THEIRS, RATE, theirs[name])
            report.ratio(ours, other, TARGET, at_least=True)
        return report


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.bench")
    parser.add_argument("--tools", type=Path, help="folder with llama-bench and the other tools")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=("1b", "tiny", "smollm2"), default="1b")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    try:
        tools = Tools(options.tools or llamacpp_tools.build())
        report = measure(tools, named_model(options.model), options.rounds)
    except (ToolFailed, LocalgenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands += [command("benchmarks.bench", arguments), *tools.commands]
    print(report.text())
    report.save("bench", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
