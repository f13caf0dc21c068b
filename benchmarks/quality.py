"""Measure perplexity and KL divergence of a model after quantization by each method.

python -m benchmarks.quality [--model tiny|smollm2] [--only gptq-3,rtn-3] [--swap]
                             [--grids symmetric|asymmetric]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import ModelLine, Report, command, table
from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.bench.estimates import bootstrap_interval
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import PACKAGED_MODELS, packaged_model
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.layer_forward import (
    CalibrationLayer,
    LayerForward,
    compute_logits,
    embed_tokens,
)
from localgen.quant.methods import grid
from localgen.quant.methods.layer import quantize_layer
from localgen.quant.request.recipe import Recipe

HERE = Path(__file__).parent
MODEL = HERE.parent / "localgen" / "models" / "tiny"
WINDOW = 512
# windows per batch
BATCH = 4
# log probabilities of 49,152 tokens at each position are kept; 576 inputs are no multiple of 128
SMOLLM2_WINDOWS, SMOLLM2_GROUP = 12, 64
RECIPES = {
    "rtn-4": Recipe(method="rtn", bits=4),
    "awq-4, no clipping": Recipe(method="awq", bits=4, clip=False),
    "awq-4": Recipe(method="awq", bits=4),
    "gptq-4": Recipe(method="gptq", bits=4),
    "rtn-3": Recipe(method="rtn", bits=3),
    "awq-3, no clipping": Recipe(method="awq", bits=3, clip=False),
    "awq-3": Recipe(method="awq", bits=3),
    "gptq-3": Recipe(method="gptq", bits=3),
    "rtn-8": Recipe(method="rtn", bits=8),
    "awq-8": Recipe(method="awq", bits=8),
    "gptq-8": Recipe(method="gptq", bits=8),
    "smoothquant, weights only": Recipe(method="smoothquant", bits=8),
    "fp8": Recipe(method="fp8", bits=8),
    "symmetric gptq-4": Recipe(method="gptq", bits=4, asymmetry=0.0),
    "symmetric gptq-3": Recipe(method="gptq", bits=3, asymmetry=0.0),
}
# recipes that are compared window by window, if both are measured
COMPARED = {
    "gptq-4": "symmetric gptq-4",
    "gptq-3": "symmetric gptq-3",
}
# maximum perplexity: that of a plain prototype of each method on this text
PERPLEXITY = {
    "rtn-4": 15.72,
    "awq-4, no clipping": 15.63,
    "awq-4": 15.57,
    "gptq-4": 15.40,
    "rtn-3": 17.45,
    "awq-3, no clipping": 17.54,
    "awq-3": 15.88,
    "gptq-3": 15.81,
}
# minimum recovered share of the perplexity that round-to-nearest adds
RECOVERED = {"awq-4": 0.45, "gptq-4": 0.85, "awq-3": 0.75, "gptq-3": 0.75}
# maximum perplexity relative to the original's
EIGHT_BITS = 1.005


@dataclass(frozen=True, slots=True)
class Loss:
    """Perplexity, and the KL divergence from the original model in nats per token, by window."""

    perplexity: float
    divergences: tuple[float, ...]

    @property
    def divergence(self) -> float:
        return statistics.fmean(self.divergences)


class EvaluatedModel:
    """A Hugging Face folder, its calibration text and its evaluation text.

    encode: its tokenizer. max_windows: of either text.
    """

    def __init__(
        self,
        folder: Path,
        encode: Callable[[str], list[int]],
        *,
        swap: bool,
        max_windows: int | None = None,
    ) -> None:
        lines = (HERE / "data" / "heldout.txt").read_text(encoding="utf-8").splitlines(True)
        halves = "".join(lines[: len(lines) // 2]), "".join(lines[len(lines) // 2 :])
        calibration, trial = reversed(halves) if swap else halves
        self.spec = read_hf_config(folder)
        self._checkpoint = NumpyCheckpoint(folder)
        self._embedding = self._read("model.embed_tokens.weight")
        self._forward = LayerForward(self.spec, WINDOW)
        # the same dtype as `localgen quantize` uses
        dtype = calibration_dtype(torch.device("cpu"), self.spec.hidden_size)
        self._calibrating = LayerForward(self.spec, WINDOW, dtype=dtype)
        self._calibration = windows(encode(calibration))[:max_windows, :WINDOW]
        self._trial = windows(encode(trial))[:max_windows]

    def loss(self, recipe: Recipe | None) -> Loss:
        """Quantize the model with a recipe, or keep the original if None, and evaluate it."""
        layers = [self._layer(index) for index in range(self.spec.num_layers)]
        if recipe is not None:
            layers = self._quantized(layers, recipe)
        nats, divergences = 0.0, list[float]()
        for batch, original in zip(torch.split(self._trial, BATCH), self._original, strict=True):
            found = self._log_shares(layers, batch)
            nats -= float(found.gather(-1, batch[:, 1:, None]).double().sum())
            apart = functional.kl_div(found, original, reduction="none", log_target=True)
            divergences += apart.sum(-1).mean(-1).tolist()
        return Loss(math.exp(nats / self._trial[:, 1:].numel()), tuple(divergences))

    @cached_property
    def _original(self) -> list[Tensor]:
        layers = [self._layer(index) for index in range(self.spec.num_layers)]
        return [self._log_shares(layers, batch) for batch in torch.split(self._trial, BATCH)]

    def _quantized(self, layers: list[LayerTensors], recipe: Recipe) -> list[LayerTensors]:
        """Quantize layer by layer; each is calibrated with the outputs of the quantized ones."""
        found = []
        run = self._calibrating.run
        hidden = original = embed_tokens(self.spec, self._embedding, self._calibration)
        for index, layer in enumerate(layers):
            given, beside = torch.split(hidden, BATCH), torch.split(original, BATCH)
            taken = CalibrationLayer(
                index, layer, partial(iter, given), self._calibrating, partial(iter, beside)
            )
            found.append(quantize_layer(taken, recipe).dequantize())
            hidden = torch.cat([run(index, found[-1], part) for part in given])
            if recipe.is_asymmetric:
                original = torch.cat([run(index, layer, part) for part in beside])
        return found

    def _log_shares(self, layers: list[LayerTensors], ids: Tensor) -> Tensor:
        """Log probabilities of the next tokens, float32 [windows, WINDOW, vocab]."""
        hidden = embed_tokens(self.spec, self._embedding, ids[:, :-1])
        for index, layer in enumerate(layers):
            hidden = self._forward.run(index, layer, hidden)
        norm = self._read("model.norm.weight")
        return compute_logits(self.spec, norm, self._embedding, hidden).log_softmax(-1)

    def _layer(self, index: int) -> LayerTensors:
        prefix = f"model.layers.{index}."
        names = [name for name in self._checkpoint.names() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self._checkpoint.read(name)))


def windows(ids: list[int]) -> Tensor:
    """Cut tokens into windows of WINDOW tokens and the next one; the remainder is dropped.

    Returns int64 [windows, WINDOW + 1].
    """
    starts = range(0, len(ids) - WINDOW, WINDOW)
    return torch.tensor([ids[start : start + WINDOW + 1] for start in starts])


@contextlib.contextmanager
def opened_model(name: str, *, swap: bool) -> Iterator[tuple[EvaluatedModel, dict[str, Recipe]]]:
    """Open the built-in model or smollm2; yield it and the recipes that fit its shapes."""
    if name == BUILT_IN_MODEL:
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        model = EvaluatedModel(MODEL, lambda text: tokenizer.encode(text).ids, swap=swap)
        yield model, RECIPES
        return
    # transformers is imported only where smollm2 is measured
    from benchmarks.agreement_parts.logits import transformers_model

    path = packaged_model(name).path
    source = open_gguf_source(path)
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(path, source.spec).save_pretrained(folder)
        encode = source.load_tokenizer().encode
        yield (
            EvaluatedModel(Path(folder), encode, swap=swap, max_windows=SMOLLM2_WINDOWS),
            {key: replace(recipe, group_size=SMOLLM2_GROUP) for key, recipe in RECIPES.items()},
        )


def chosen(only: str | None) -> Iterator[str]:
    """Yield the recipes whose names begin with one of a comma-separated list, or all if None."""
    for name in RECIPES:
        if only is None or name.startswith(tuple(only.split(","))):
            yield name


def enter(report: Report, losses: dict[str, Loss], *, targets: bool = True) -> None:
    """Add all figures to the report. targets: check those that have a target."""
    found = {name: report.add("perplexity", name, "", [x.perplexity]) for name, x in losses.items()}
    for name, loss in losses.items():
        report.add("KL divergence", name, "mnats", [1e3 * loss.divergence])
    for name, other in COMPARED.items():
        if name in losses and other in losses:
            report.add(f"KL minus that of {other}", name, "mnats", [*difference(losses, name)])
    if not targets:
        return
    for name, most in PERPLEXITY.items():
        if name in found:
            report.most(found[name], most)
    original = losses["original"].perplexity
    for name, least in RECOVERED.items():
        floor = f"rtn-{name[-1]}"
        if name in losses and floor in losses:
            gap = losses[floor].perplexity - original
            recovered = (losses[floor].perplexity - losses[name].perplexity) / gap
            report.least(report.add("recovered of rtn's loss", name, "", [recovered]), least)
    for name, series in found.items():
        if name != "original" and RECIPES[name].bits == 8:
            report.ratio(series, found["original"], EIGHT_BITS, at_least=False)


def difference(losses: dict[str, Loss], name: str) -> tuple[float, float, float]:
    """KL divergence of a recipe minus that of the one it is compared with, in thousandths of a
    nat, and its 95 % interval: a paired bootstrap over windows."""
    pairs = zip(losses[name].divergences, losses[COMPARED[name]].divergences, strict=True)
    moved = [1e3 * (one - other) for one, other in pairs]
    low, high = bootstrap_interval([moved], lambda groups: statistics.fmean(groups[0]))
    return statistics.fmean(moved), low, high


def grids(kind: str | None) -> contextlib.AbstractContextManager[object]:
    """Round in all widths on grids of one kind, or as `localgen quantize` does if None."""
    if kind is None:
        return contextlib.nullcontext()
    return mock.patch.object(grid, "is_symmetric", return_value=kind == "symmetric")


def text(report: Report, losses: dict[str, Loss]) -> str:
    """Return the tables of losses and of targets."""
    original = losses["original"].perplexity
    rows = [
        (name, f"{x.perplexity:.3f}", f"{x.perplexity / original - 1:+.2%}", f"{x.divergence:.4f}")
        for name, x in losses.items()
    ]
    checks = [
        (name, wanted, f"{check.value:.4g}", met)
        for check in report.checks
        for name, wanted, _, _, met in [check.row()]
    ]
    compared = [
        (name, other, f"{found[0]:+.2f}", "{1:+.2f} to {2:+.2f}".format(*found))
        for name, other in COMPARED.items()
        if name in losses and other in losses
        for found in [difference(losses, name)]
    ]
    return "\n".join(
        [
            table(("weights", "perplexity", "change", "KL divergence"), rows),
            table(("weights", "beside", "KL difference, mnats", "95 % interval"), compared),
            table(("target", "wanted", "measured", "met"), checks),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a target is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", choices=PACKAGED_MODELS, default=BUILT_IN_MODEL)
    parser.add_argument("--only", help="prefixes of recipe names, separated by commas")
    parser.add_argument("--swap", action="store_true", help="calibrate with the other half")
    parser.add_argument(
        "--grids",
        choices=("symmetric", "asymmetric"),
        help="one kind in all widths; the default is that of the files",
    )
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    opened = opened_model(options.model, swap=options.swap)
    with grids(options.grids), opened as (model, recipes):
        losses = {"original": model.loss(None)}
        for name in chosen(options.only):
            losses[name] = model.loss(recipes[name])
            print(f"{name}: {losses[name].perplexity:.3f}", file=sys.stderr)
        spec = model.spec
    line = ModelLine(
        f"localgen {options.model}", packaged_model(options.model).size_bytes, spec.num_params
    )
    report = Report(line, 1, options.only is not None, torch.get_num_threads(), {})
    enter(report, losses, targets=options.model == BUILT_IN_MODEL and not options.grids)
    report.commands.append(command("benchmarks.quality", arguments))
    print(text(report, losses))
    report.save("quality", options.output)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
