"""Vary each constant of AWQ and GPTQ, and compare the loss with that of its default.

python -m benchmarks.constants [--model tiny|smollm2] [--only gptq-3] [--windows 36]
python -m benchmarks.constants --text benchmarks/data/choosing.txt

It confirms constants on text that took no part in choosing them. To choose another value, use
another text, as in the second command, so that the held-out text stays what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.evaluated_model import TextSizes, opened_model
from benchmarks.gptaq import Gptaq
from benchmarks.measure import ModelLine, Report, command, table
from benchmarks.quality import Losses, recipe_for
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import PACKAGED_MODELS, packaged_model
from localgen.quant.methods import awq, grid, layer
from localgen.quant.request.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Variant:
    """Changed fields of a recipe, or constants of a module by name."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    module: ModuleType | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def applied(self, recipe: Recipe) -> Iterator[Recipe]:
        with contextlib.ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(mock.patch.multiple(self.module, **self.constants))
            yield replace(recipe, **self.fields)


def shrinks(least: float, steps: int) -> tuple[float, ...]:
    """Fractions of a group's range from 1 to `least` at equal distances."""
    return tuple(1.0 - (1.0 - least) * step / steps for step in range(steps + 1))


def gptaq(share: float) -> Variant:
    """The term of GPTAQ, whose published share is 0.25, in place of localgen's correction."""
    other = Gptaq()
    constants = {"correct_inputs": other.correct_inputs, "round_gptq": other.round_gptq}
    return Variant({"asymmetry": share}, layer, constants)


def ranges(constant: str, steps: int) -> dict[str, Variant]:
    """Other fractions of a group's range in place of a constant of `grid`, which go from 1 to 0.5
    in steps of 1 / steps."""
    tried = {
        "range down to 0.7": shrinks(0.7, 3 * steps // 10),
        "range down to 0.3": shrinks(0.3, 7 * steps // 10),
        f"range in steps of 1/{steps // 2}": shrinks(0.5, steps // 4),
        f"range in steps of 1/{2 * steps}": shrinks(0.5, steps),
    }
    found = {name: Variant(module=grid, constants={constant: each}) for name, each in tried.items()}
    return found | {"whole range": Variant({"clip": False})}


VARIANTS: dict[str, dict[str, Variant]] = {
    "awq": {
        "10 powers": Variant(module=awq, constants={"_NUM_POWERS": 10}),
        "40 powers": Variant(module=awq, constants={"_NUM_POWERS": 40}),
        "256 sampled rows": Variant(module=awq, constants={"_SAMPLE_ROWS": 256}),
        "search in ranges down to 0.7": Variant(
            module=grid, constants={"_COARSE_SHRINKS": shrinks(0.7, 3)}
        ),
        "search in whole ranges": Variant(module=grid, constants={"_COARSE_SHRINKS": (1.0,)}),
        **ranges("_OUTPUT_SHRINKS", 40),
    },
    "gptq": {
        "damping 0.001": Variant({"damping": 0.001}),
        "damping 0.003": Variant({"damping": 0.003}),
        "damping 0.03": Variant({"damping": 0.03}),
        "damping 0.1": Variant({"damping": 0.1}),
        "file order": Variant({"desc_act": False}),
        "asymmetry 0": Variant({"asymmetry": 0.0}),
        "asymmetry 0.5": Variant({"asymmetry": 0.5}),
        "asymmetry 1": Variant({"asymmetry": 1.0}),
        "GPTAQ 0.25": gptaq(0.25),
        "GPTAQ 0.5": gptaq(0.5),
        "GPTAQ 1": gptaq(1.0),
        **ranges("_WEIGHT_SHRINKS", 20),
    },
}
DEFAULT = "default"
SIZES = {"tiny": TextSizes(16, 24), "smollm2": TextSizes(12, 18)}


def measured(only: str | None, variants: str | None) -> Iterator[tuple[str, str, Recipe]]:
    """Yield the key, the variant's name and the recipe of each run, the default first.

    only, variants: beginnings of keys and names, with commas; None for all.
    """
    for method in ("awq", "gptq"):
        for bits in (4, 3, 2):
            key = f"{method}-{bits}"
            if _is_wanted(key, only):
                recipe = Recipe(method="awq" if method == "awq" else "gptq", bits=bits)
                yield key, DEFAULT, recipe
                for name in VARIANTS[method]:
                    if _is_wanted(name, variants):
                        yield key, name, recipe


def _is_wanted(name: str, beginnings: str | None) -> bool:
    return beginnings is None or name.startswith(tuple(beginnings.split(",")))


def row(losses: Losses, key: str, name: str) -> tuple[str, ...]:
    """Table cells of one variant: KL, difference from the default's, and if it can be told."""
    found = losses.kl(f"{key}, {name}").text(1e3)
    if name == DEFAULT:
        return key, name, found, "", ""
    difference = losses.difference(f"{key}, {name}", f"{key}, {DEFAULT}")
    bounds = difference.interval
    told = "" if bounds is None or not bounds.excludes_zero else "worse"
    if told and difference.mean < 0:
        told = "better"
    return key, name, found, difference.text(1e3, "+.2f"), told


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constants", description=__doc__)
    parser.add_argument("--model", choices=PACKAGED_MODELS, default=BUILT_IN_MODEL)
    parser.add_argument("--only", help="prefixes of awq-4, awq-3, … gptq-2, with commas")
    parser.add_argument("--variants", help="beginnings of their names, with commas")
    parser.add_argument("--samples", type=int, help="windows of the calibration text")
    parser.add_argument("--windows", type=int, help="windows of the held-out text")
    parser.add_argument("--text", type=Path, help="measure on this text instead, to choose")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    sizes = SIZES[options.model]
    sizes = TextSizes(options.samples or sizes.calibration, options.windows or sizes.held_out)
    line = ModelLine(f"localgen {options.model}", packaged_model(options.model).size_bytes, 0)
    report = Report(line, 1, bool(options.only or options.variants), torch.get_num_threads(), {})
    report.commands.append(command("benchmarks.constants", arguments))
    rows = []
    with opened_model(options.model, sizes, options.text) as model:
        report.model = replace(line, params=model.spec.num_params)
        losses = Losses(model.losses(None), model.domains)
        for key, name, recipe in measured(options.only, options.variants):
            variant = VARIANTS[recipe.method].get(name, Variant())
            with variant.applied(recipe_for(options.model, recipe)) as changed:
                losses.found[f"{key}, {name}"] = model.losses(changed)
            rows.append(row(losses, key, name))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            report.add(
                f"{key}: KL divergence", name, "mnats", losses.kl(f"{key}, {name}").scaled(1e3)
            )
            if name != DEFAULT:
                moved = losses.difference(f"{key}, {name}", f"{key}, {DEFAULT}")
                report.add(f"{key}: KL minus the default's", name, "mnats", moved.scaled(1e3))
            report.save("constants", options.output)
    print(table(("method", "constant", "KL, mnats", "minus the default's", ""), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
