"""Compare localgen on a CPU with llama.cpp's own tools, in one run.

python -m benchmarks.cpu [--tools DIR | --no-tools] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks import constrained, footprint, llamacpp_tools, random_gguf, real_text, speed
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import ModelLine, Report, command
from benchmarks.real_text import RealTextBench
from benchmarks.servers import Localgen
from benchmarks.speed import CpuBench
from benchmarks.streams import StreamFailed
from localgen.backends.errors import LocalgenError
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.bench.private_server import private_settings
from localgen.config import BUILT_IN_MODEL, ServerSettings
from localgen.hub.packaged import BUILT_IN_PATH, SMOLLM2, packaged_model

CTX, KV_TOKENS = 8192, 16_384
TESTS = ("alone", "grammar", "several", "prefix", "turn", "overhead", "help", "memory", "drafts")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    options = _options(arguments)
    try:
        tools = None if options.no_tools else Tools(options.tools or llamacpp_tools.build())
        with private_settings() as settings:
            report = _measure(options, tools, settings)
    except (ToolFailed, StreamFailed, LocalgenError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands[:0] = [command("benchmarks.cpu", arguments)]
    if tools:
        report.commands += tools.commands
    print(report.text())
    report.save("cpu", options.output)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.cpu")
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument("--tools", type=Path, help="folder with llama-bench and the other tools")
    peers.add_argument("--no-tools", action="store_true", help="measure only localgen")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one short round")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="threads of every engine (default: localgen's)")
    parser.add_argument(
        "--only", nargs="+", choices=TESTS, default=TESTS, help="tests to run (default: all)"
    )
    parser.add_argument("--output", type=Path, help="result file")
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace, tools: Tools | None, settings: ServerSettings) -> Report:
    plan = speed.QUICK if options.quick else speed.FULL
    model = random_gguf.cached(random_gguf.SHAPES["quick" if options.quick else "1b"])
    server = Localgen(
        settings,
        model,
        # drafts would make random text, which repeats itself, look fast
        LoadOptions(ctx=CTX, kv_tokens=KV_TOKENS, threads=options.threads, draft="none"),
    )
    info, loaded = server.info, server.info.options
    rounds = options.rounds or plan.rounds
    report = Report(
        ModelLine(info.description, info.size_bytes, info.params),
        rounds,
        options.quick,
        threads=loaded.threads or 0,
        load_options={"ctx": CTX, "kv_tokens": KV_TOKENS},
    )
    bench = CpuBench(
        plan=plan,
        rounds_wanted=rounds,
        report=report,
        model=model,
        threads=report.threads,
        localgen=server,
        tools=tools,
    )
    _speed(bench, options.only)
    server.close()
    _footprint(report, settings, options)
    if "drafts" in options.only:
        _drafts(report, options)
    return report


def _speed(bench: CpuBench, only: tuple[str, ...]) -> None:
    if "alone" in only:
        speed.alone(bench, when="empty pool", fresh=True)
        bench.localgen.load()
    if "grammar" in only:
        constrained.grammar(bench)
    if "several" in only:
        for count in bench.plan.streams:
            speed.several(bench, count)
    if "prefix" in only:
        speed.shared_prefix(bench)
    if "turn" in only:
        speed.second_turn(bench)
    if "alone" in only and len(only) > 1:
        speed.alone(bench, when="pool in use", fresh=False)


def _footprint(report: Report, settings: ServerSettings, options: argparse.Namespace) -> None:
    """Measure overhead with the built-in model, whose compute time is negligible."""
    runs = 10 if not options.quick else 3
    if "overhead" in options.only:
        tiny = Localgen(settings, BUILT_IN_PATH, LoadOptions(threads=options.threads))
        alone = load_llamacpp_model(
            ModelLoadRequest(
                BUILT_IN_MODEL, str(BUILT_IN_PATH), LoadOptions(threads=options.threads)
            ),
            lambda _: None,
        )
        footprint.overhead(report, tiny, alone, 3 * runs)
        alone.runner.close()
        tiny.close()
    if "help" in options.only:
        footprint.help_time(report, runs)
    if "memory" in options.only:
        tiny = Localgen(settings, None, LoadOptions(threads=options.threads))
        footprint.memory(report, tiny)
        tiny.close()


def _drafts(report: Report, options: argparse.Namespace) -> None:
    """Measure what drafts gain on the texts of a real model, for which random text says nothing."""
    try:
        path = packaged_model(SMOLLM2).path
    except LocalgenError as error:
        report.not_compared.append(f"drafts: {error}")
        return
    bench = RealTextBench(path, options.threads, report.rounds, options.quick)
    line, _ = bench.describe()
    real_text.drafts(bench, replace(report, model=line))


if __name__ == "__main__":
    sys.exit(main())
