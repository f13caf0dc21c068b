"""Measure what a step of 1 to 16 tokens costs, by the type of the weights.

python -m benchmarks.steps [--types q4_k_m,q4_0,iq4_nl,q8_0] [--rounds N]: figures of docs/cpu.md.
A step of several tokens verifies drafts or serves several sessions. A bare loop over the low-level
API, as in benchmarks.attention; the types take turns, so that a change of the machine meets all.
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
from benchmarks.attention import rows
from benchmarks.measure import table
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
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


def main() -> int:
    """Run the benchmark and print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(TYPES), help="types of the weights")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.types.split(",")
    if unknown := set(names) - TYPES.keys():
        parser.error(f"unknown types {', '.join(unknown)}: choose from {', '.join(TYPES)}")
    measured: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            model = LlamaModel(cached(name), resolve_llama_options(LoadOptions()), lambda _: None)
            measured[name].append(rows(model, _LENGTH, SIZES))
            model.close()
    medians = {
        name: [statistics.median(values) for values in zip(*rounds, strict=True)]
        for name, rounds in measured.items()
    }
    head = ("tokens in the step", *map(str, SIZES))
    print(table(head, [(name, *(f"{ms:.0f} ms" for ms in row)) for name, row in medians.items()]))
    relative = [(name, *(f"{ms / row[0]:.2f}" for ms in row)) for name, row in medians.items()]
    print(table(("relative to one token", *map(str, SIZES)), relative))
    return 0


if __name__ == "__main__":
    sys.exit(main())
