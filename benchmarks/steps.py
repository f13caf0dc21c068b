"""Measure the cost of a step of 1 to 16 tokens, by the type of the weights.

python -m benchmarks.steps [--types q4_k_m,q4_0,iq4_nl,q8_0] [--rounds N] [--output FILE]: figures
of docs/cpu.md. A step of several tokens verifies drafts or serves several sessions. Measured in a
bare loop, as in benchmarks.attention; the types alternate, so that disturbances affect all.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
from pathlib import Path

import llama_cpp.llama_cpp as C

from benchmarks import random_gguf
from benchmarks.attention import step_ms
from benchmarks.measure import ModelLine, Report, Series, command, table
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions

TYPES = {
    "q4_k_m": C.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_0": C.LLAMA_FTYPE_MOSTLY_Q4_0,
    "iq4_nl": C.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "q8_0": C.LLAMA_FTYPE_MOSTLY_Q8_0,
}
SIZES = (1, 2, 3, 4, 6, 8, 16)
_LENGTH = 200  # tokens in the KV cache


def cached(name: str) -> Path:
    """Return the path of the random 1.24 B model in this type; write it if missing.

    Raises RuntimeError if llama.cpp cannot quantize the model.
    """
    source = random_gguf.cached(random_gguf.SHAPES["1b"])
    target = source.with_name(source.name.replace("q4_k_m", name))
    if not target.exists():
        params = C.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = TYPES[name], True
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        if C.llama_model_quantize(bytes(source), bytes(partial), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot quantize {source} to {name}")
        partial.replace(target)
    return target


def measure(report: Report, models: dict[str, Path]) -> str:
    """Add the step times of each type to the report; return the tables of their medians.

    models: a file per type. A value is the median of the repeats in a round.
    """
    rounds_ms: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(report.rounds):
        for name, path in models.items():
            model = LlamaModel(path, resolve_llama_options(LoadOptions()), lambda _: None)
            repeats_ms = step_ms(model, _LENGTH, SIZES)
            rounds_ms[name].append([statistics.median(each_ms) for each_ms in repeats_ms])
            model.close()
    series = {
        name: [
            report.add(f"step of {size} tokens", name, "ms", values)
            for size, values in zip(SIZES, zip(*rounds, strict=True), strict=True)
        ]
        for name, rounds in rounds_ms.items()
    }
    return "\n".join(_tables(series))


def _tables(series: dict[str, list[Series]]) -> tuple[str, str]:
    """Tables of the times, and of the times relative to one token."""
    sizes = tuple(map(str, SIZES))
    times = [(name, *(f"{one.median:.0f} ms" for one in row)) for name, row in series.items()]
    relative = [
        (name, *(f"{one.median / row[0].median:.2f}" for one in row))
        for name, row in series.items()
    ]
    return (
        table(("tokens in the step", *sizes), times),
        table(("relative to one token", *sizes), relative),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a model cannot be quantized."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.steps")
    parser.add_argument("--types", default=",".join(TYPES), help="types of the weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    names = options.types.split(",")
    if unknown := set(names) - TYPES.keys():
        parser.error(f"unknown types {', '.join(unknown)}: choose from {', '.join(TYPES)}")
    try:
        models = {name: cached(name) for name in names}
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = models[names[0]].stat().st_size
    line = ModelLine(f"random 1.24 B, {', '.join(names)}", size, 1_235_814_400)
    report = Report(line, options.rounds, False, num_physical_cores(), {})
    report.commands.append(command("benchmarks.steps", arguments))
    print(measure(report, models))
    report.save("steps", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
