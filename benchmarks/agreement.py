"""Compare text, logits, tokens and prompts of localgen with llama.cpp and transformers.

python -m benchmarks.agreement [--tools DIR] [--only PART ...] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import llamacpp_tools
from benchmarks.agreement_parts.compared_model import ComparedModel
from benchmarks.agreement_parts.greedy import greedy
from benchmarks.agreement_parts.logits import logits
from benchmarks.agreement_parts.templates import templates
from benchmarks.agreement_parts.tokens import tokens
from benchmarks.answers import AnswerFailed
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import ModelLine, Report, command
from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.hub.packaged import SMOLLM2, packaged_model

PARTS = ("greedy", "logits", "tokens", "templates")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison.

    Returns 1 if a part fails or misses a target, or if nothing was compared.
    """
    options = _options(arguments)
    try:
        model = _model(options)
        tools = Tools(options.tools or llamacpp_tools.build()) if "greedy" in options.only else None
        _compare(model, tools, options)
    except (AnswerFailed, ToolFailed, LocalgenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = model.report
    report.commands.append(command("benchmarks.agreement", arguments))
    report.commands += tools.commands if tools else []
    print(report.text())
    report.save("agreement", options.output)
    return 0 if report.checks and all(check.met for check in report.checks) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.agreement")
    parser.add_argument("--tools", type=Path, help="folder with llama-completion")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--model", type=Path, help=f"a Llama GGUF file (default: {SMOLLM2})")
    parser.add_argument("--threads", type=int, help="threads of llama.cpp on both sides")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the texts")
    parser.add_argument("--output", type=Path, help="result file")
    return parser.parse_args(arguments)


def _model(options: argparse.Namespace) -> ComparedModel:
    """Open the model. Raises ModelNotFound with the command that installs it."""
    path = options.model or packaged_model(SMOLLM2).path
    source, threads = open_gguf_source(path), options.threads or num_physical_cores()
    line = ModelLine(path.stem, path.stat().st_size, source.spec.num_params)
    return ComparedModel(path, source, threads, Report(line, 1, options.quick, threads, {}))


def _compare(model: ComparedModel, tools: Tools | None, options: argparse.Namespace) -> None:
    share = 20 if options.quick else 1
    for part in options.only:
        print(part, file=sys.stderr, flush=True)
        match part:
            case "greedy":
                assert tools is not None
                greedy(model, tools, 3 if options.quick else 50)
            case "logits":
                logits(model, 400 // share)
            case "tokens":
                tokens(model, 2000 // share)
            case "templates":
                templates(model, 1000 // share)


if __name__ == "__main__":
    sys.exit(main())
