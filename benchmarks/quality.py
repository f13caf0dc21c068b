"""Measure KL divergence and perplexity of a model after quantization by each method.

python -m benchmarks.quality [--model tiny|smollm2] [--only gptq-3,rtn-3] [--windows 36]
    [--text benchmarks/data/choosing.txt] [--steps 50]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.evaluated_model import SIZES, TextSizes, opened_model
from benchmarks.measure import ModelLine, Report, command, table
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import PACKAGED_MODELS, packaged_model
from localgen.quant.evaluate import EvalMetrics
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.intervals import PairedBootstrap
from localgen.quant.request.losses import Interval
from localgen.quant.request.recipe import LEARNING_METHODS, QuantizeMethod, Recipe

# rounding learned in some steps
STEPS, LEARNED = 200, " learned"
# 2 to 4 bits: method, suffix of the name, changes of the recipe
VARIANTS: tuple[tuple[QuantizeMethod, str, dict[str, Any]], ...] = (
    ("rtn", ", no clipping", {"clip": False}),
    ("rtn", "", {}),
    ("awq", ", no clipping", {"clip": False}),
    ("awq", "", {}),
    ("awq", LEARNED, {"rounding_steps": STEPS}),
    ("gptq", ", symmetric", {"asymmetry": 0.0}),
    ("gptq", "", {}),
    ("gptq", LEARNED, {"rounding_steps": STEPS}),
)
RECIPES = {
    f"{method}-{bits}{variant}": Recipe(method=method, bits=bits, **changes)
    for bits in (4, 3, 2)
    for method, variant, changes in VARIANTS
} | {
    "rtn-8": Recipe(method="rtn", bits=8),
    "awq-8": Recipe(method="awq", bits=8),
    "gptq-8": Recipe(method="gptq", bits=8),
    "smoothquant, weights only": Recipe(method="smoothquant", bits=8),
    "fp8": Recipe(method="fp8", bits=8),
}
# 576 inputs are no multiple of 128
SMOLLM2_GROUP = 64
# recipes that are compared window by window, if both are measured
COMPARED = tuple(
    (f"{method}-{bits}", f"{other}-{bits}{variant}")
    for bits in (4, 3, 2)
    for method, other, variant in (
        ("rtn", "rtn", ", no clipping"),
        ("awq", "rtn", ""),
        ("gptq", "rtn", ""),
        ("gptq", "gptq", ", symmetric"),
    )
) + tuple(
    (f"{method}-{bits}{LEARNED}", f"{method}-{bits}")
    for method in LEARNING_METHODS
    for bits in (4, 3, 2)
)
# the interval of every difference of these lies below 0
BETTER = ("awq-4", "gptq-4", "awq-3", "gptq-3", "awq-2", "gptq-2", f"gptq-2{LEARNED}")
# maximum perplexity relative to the original's
EIGHT_BITS = 1.005


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over windows with its interval. Exact for a model without a loss."""

    mean: float
    interval: Interval | None

    def scaled(self, factor: float) -> tuple[float, ...]:
        bounds = () if self.interval is None else (self.interval.low, self.interval.high)
        return tuple(factor * value for value in (self.mean, *bounds))

    def text(self, factor: float, form: str = ".2f") -> str:
        mean, *bounds = (f"{value:{form}}" for value in self.scaled(factor))
        return f"{mean} ({' to '.join(bounds)})" if bounds else mean


class Losses:
    """Losses of quantized models on the same windows. domains: of each window."""

    def __init__(self, original: EvalMetrics, domains: Sequence[str]) -> None:
        self.original = original
        self.found: dict[str, EvalMetrics] = {}
        self.domains = np.array(domains)
        self._bootstrap = PairedBootstrap(domains, len(domains))

    def kl(self, name: str, domain: str | None = None) -> Estimate:
        return self._estimate(_kl(self.found[name]), domain)

    def difference(self, name: str, other: str) -> Estimate:
        """KL divergence of one minus that of another."""
        return self._estimate(_kl(self.found[name]) - _kl(self.found[other]))

    def _estimate(self, values: NDArray[np.float64], domain: str | None = None) -> Estimate:
        if domain is None:
            return Estimate(float(values.mean()), self._bootstrap.interval(values))
        part = values[self.domains == domain]
        return Estimate(float(part.mean()), PairedBootstrap((), len(part)).interval(part))


def _kl(metrics: EvalMetrics) -> NDArray[np.float64]:
    assert metrics.window_kl is not None
    return metrics.window_kl


def chosen(only: str | None) -> Iterator[str]:
    """Yield the recipes of a comma-separated list of names, or beginnings of names; None: all."""
    wanted = list(RECIPES) if only is None else only.split(",")
    beginnings = tuple(one for one in wanted if one not in RECIPES)
    for name in RECIPES:
        if name in wanted or (beginnings and name.startswith(beginnings)):
            yield name


def recipe_for(model: str, recipe: Recipe) -> Recipe:
    """The recipe in groups that fit the model's shapes."""
    return recipe if model == BUILT_IN_MODEL else replace(recipe, group_size=SMOLLM2_GROUP)


def enter(report: Report, losses: Losses) -> None:
    """Add all figures and targets to the report: mean, and bounds of the interval if known."""
    perplexity = report.add("perplexity", "original", "", [losses.original.perplexity])
    for name, metrics in losses.found.items():
        series = report.add("perplexity", name, "", [metrics.perplexity])
        report.add("KL divergence", name, "mnats", losses.kl(name).scaled(1e3))
        for domain in dict.fromkeys(losses.domains.tolist()):
            values = losses.kl(name, domain).scaled(1e3)
            report.add(f"KL divergence, {domain}", name, "mnats", values)
        if name in RECIPES and RECIPES[name].bits == 8:
            report.ratio(series, perplexity, EIGHT_BITS, at_least=False)
    for name, other in compared(losses.found):
        difference = losses.difference(name, other)
        test = f"KL minus that of {other}"
        report.add(test, name, "mnats", difference.scaled(1e3))
        if name in BETTER and difference.interval is not None:
            bound = 1e3 * difference.interval.high
            report.most(report.add(f"{test}, upper bound", name, "mnats", [bound]), 0.0)


def compared(found: Mapping[str, EvalMetrics]) -> Iterator[tuple[str, str]]:
    """Pairs that are both measured: of COMPARED, and gptq, with learned rounding too, with each
    folder of the same bits."""
    folders = [name for name in found if name not in RECIPES]
    beside = (
        (f"gptq-{name.partition(' bits: ')[0]}{learned}", name)
        for name in folders
        for learned in ("", LEARNED)
    )
    return ((one, other) for one, other in (*COMPARED, *beside) if {one, other} <= found.keys())


def text(report: Report, losses: Losses) -> str:
    """Return the tables of losses, of differences and of targets."""
    original = losses.original.perplexity
    domains = tuple(dict.fromkeys(losses.domains.tolist()))
    rows = [
        (
            name,
            losses.kl(name).text(1e3),
            *(losses.kl(name, domain).text(1e3) for domain in domains),
            f"{metrics.perplexity:.3f}",
            f"{metrics.perplexity / original - 1:+.2%}",
        )
        for name, metrics in losses.found.items()
    ]
    differences = [
        (name, other, losses.difference(name, other).text(1e3, "+.2f"))
        for name, other in compared(losses.found)
    ]
    checks = [
        (name, wanted, f"{check.value:.4g}", met)
        for check in report.checks
        for name, wanted, _, _, met in [check.row()]
    ]
    head = ("weights", "KL, mnats", *domains, "perplexity", "change")
    return "\n".join(
        [
            f"perplexity in 16 bits: {original:.3f}; {len(losses.domains)} windows",
            table(head, rows),
            table(("weights", "beside", "KL difference, mnats"), differences),
            table(("target", "wanted", "measured", "met"), checks),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a target is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", choices=PACKAGED_MODELS, default=BUILT_IN_MODEL)
    parser.add_argument("--only", help="recipes, or beginnings of their names, with commas")
    parser.add_argument("--windows", type=int, help="windows of the held-out text")
    parser.add_argument("--text", type=Path, help="measure on this text instead, to choose")
    parser.add_argument("--samples", type=int, help="windows of the calibration text")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of learned rounding (default: {STEPS})"
    )
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="also a quantized folder"
    )
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    sizes = SIZES[options.model]
    sizes = TextSizes(options.samples or sizes.calibration, options.windows or sizes.held_out)
    with opened_model(options.model, sizes, options.text) as model:
        losses = Losses(model.losses(None), model.domains)
        for name in chosen(options.only):
            recipe = recipe_for(options.model, RECIPES[name])
            if recipe.rounding_steps:
                recipe = replace(recipe, rounding_steps=options.steps)
            losses.found[name] = model.losses(recipe)
            print(f"{name}: {losses.kl(name).text(1e3)}", file=sys.stderr)
        for folder in options.folder:
            source = LayerwiseCheckpoint(folder)
            bits = source.spec.quant.bits if source.spec.quant else 16
            losses.found[f"{bits} bits: {folder.name}"] = model.folder_losses(source)
        spec = model.spec
    line = ModelLine(
        f"localgen {options.model}", packaged_model(options.model).size_bytes, spec.num_params
    )
    report = Report(line, 1, options.only is not None, torch.get_num_threads(), {})
    enter(report, losses)
    report.commands.append(command("benchmarks.quality", arguments))
    print(text(report, losses))
    report.save("quality", options.output)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
