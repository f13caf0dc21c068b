"""KL divergence of `localgen quantize --gguf auto` and of llama.cpp's types at the same size.

python -m benchmarks.mixed_gguf [--model tiny|smollm2|smollm2-wide] [--types Q2_K,IQ3_M] [--gptq]

For each type of llama.cpp a file with chosen types is made that is not larger, with the same
importance matrix, and with --gptq another one whose codes GPTQ chooses. All are compared with the
16-bit file on held-out text in llama.cpp. Intervals are of the mean difference per window, from a
paired bootstrap over windows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp import Llama
from numpy.typing import NDArray

from benchmarks.measure import RESULTS, command, machine, table, versions
from benchmarks.model_folders import NAMES, model_folder
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.calibrate.text_windows import held_out_windows
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.gguf.requantize import make_gguf
from localgen.quant.gguf_job import unfinished_file
from localgen.quant.job import QuantizeJob
from localgen.quant.mixed.groups import GPTQ_LAYER_TYPES, FileShape, plan_file
from localgen.quant.mixed.search import (
    Mixture,
    Options,
    fit_bytes,
    smallest_mixture,
    total_bytes,
    total_kl,
)
from localgen.quant.mixed.sensitivity import PROBE_TOKENS, SensitivityProbes
from localgen.quant.preflight import PreparedQuantization, prepare_quantization
from localgen.quant.request.events import ProgressEvent, QuantizeEvent
from localgen.quant.request.recipe import CalibrationConfig, Recipe
from localgen.quant.request.request import GGUF_CALIBRATION_RECIPE

Array = NDArray[np.float64]
# near 2.6, 3.0, 3.4, 3.9 and 4.5 bits per weight, where two are as near the better known one; rows
# of 576 values, as smollm2 has, fall back to types of 4.5 bits and more
TYPES = {
    "tiny": "IQ1_M,IQ2_XXS,IQ2_S,Q2_K_S,IQ3_XS,Q3_K_M,IQ4_XS",
    "smollm2": "IQ2_M,Q3_K_S,IQ4_XS,Q4_K_M",
    "smollm2-wide": "IQ1_M,IQ2_XXS,IQ2_XS,Q2_K_S,IQ3_XS,Q3_K_M,IQ4_XS",
}
_RESAMPLES = 10_000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A type of llama.cpp and the file with chosen types that is not larger.

    stock_kl, auto_kl: mean KL divergence from the 16-bit file, in nats. low, high: 95 % interval of
    auto_kl - stock_kl. predicted_kl: of the chosen types, on the calibration text. gptq_kl: of the
    file whose codes GPTQ chooses, None without one; gptq_low, gptq_high: 95 % interval of
    gptq_kl - auto_kl.
    """

    stock: str
    bits_per_weight: float
    stock_bytes: int
    auto_bytes: int
    stock_kl: float
    auto_kl: float
    low: float
    high: float
    predicted_kl: float
    types: dict[str, list[str]]
    gptq_kl: float | None = None
    gptq_low: float | None = None
    gptq_high: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        change = self.auto_kl / self.stock_kl - 1
        by_gptq = ("", "")
        if self.gptq_kl is not None and self.gptq_low is not None and self.gptq_high is not None:
            by_gptq = (
                f"{1e3 * self.gptq_kl:.1f} ({self.gptq_kl / self.auto_kl - 1:+.0%})",
                f"{1e3 * self.gptq_low:+.1f} to {1e3 * self.gptq_high:+.1f}",
            )
        return (
            self.stock,
            f"{self.bits_per_weight:.2f}",
            f"{self.auto_bytes / self.stock_bytes - 1:+.2%}",
            f"{1e3 * self.stock_kl:.1f}",
            f"{1e3 * self.auto_kl:.1f} ({change:+.0%})",
            f"{1e3 * self.low:+.1f} to {1e3 * self.high:+.1f}",
            f"{1e3 * self.predicted_kl:.1f}",
            *by_gptq,
        )


HEAD = (
    *("type", "bits/weight", "size", "KL", "KL of auto", "95 % interval", "predicted"),
    *("KL of auto --gptq", "95 % interval"),
)


class MeasuredModel:
    """A model folder with its importance matrix, and the measured loss of its groups."""

    def __init__(self, folder: Path, place: Path, calibration: CalibrationConfig, tokens: int):
        self.folder, self._calibration = folder, calibration
        self.prepared: PreparedQuantization = prepare_quantization(
            folder, GGUF_CALIBRATION_RECIPE, calibration, "cpu"
        )
        job = QuantizeJob(folder.name, self.prepared, place / "probes.gguf", mode="observe")
        job.run(print_progress, resume=True)
        self.importance = job.input_importance()
        self.shape: FileShape = plan_file(folder, self.prepared.source.spec)
        assert self.prepared.windows is not None
        probes = SensitivityProbes(
            self.prepared.source,
            self.shape.groups,
            self.prepared.windows.ids,
            job.work_folder,
            self.prepared.device,
            tokens,
        )
        losses = probes.run(print_progress)
        self.options: Options = {
            group.name: losses[group.name].options(group) for group in self.shape.groups
        }

    def write(self, target: Path, file_type: str, mixture: Mixture | None = None) -> None:
        """Write a file of a type of llama.cpp, or with chosen types."""
        types = {
            tensor: mixture[group.name].type_name
            for group in self.shape.groups
            if mixture is not None
            for tensor, _, _ in group.tensors
        }
        make_gguf(self.folder, target, file_type, types=types, imatrix=self.importance)

    def write_by_gptq(self, target: Path, mixture: Mixture) -> None:
        """Write a file with chosen types, whose codes GPTQ chooses."""
        recipe = Recipe(method="gptq", group_size=None)
        prepared = prepare_quantization(self.folder, recipe, self._calibration, "cpu")
        rounding = GgufRounding(
            prepared.source.spec,
            target.stem,
            unfinished_file(target),
            lambda path: self.write(path, "Q4_K_M", mixture),
        )
        target.unlink(missing_ok=True)  # of an unfinished run
        job = QuantizeJob(self.folder.name, prepared, target, mode="gguf", rounding=rounding)
        job.run(print_progress, resume=True)
        job.work_folder.remove()

    def fit(self, size_bytes: int, *, by_gptq: bool = False) -> Mixture | None:
        """Chosen types for a file of this size; None if there is none so small."""
        options = self.options
        if by_gptq:
            outside = {group.name for group in self.shape.groups if group.layer is None}
            options = {
                name: [one for one in each if name in outside or one.type_name in GPTQ_LAYER_TYPES]
                for name, each in options.items()
            }
        left = size_bytes - self.shape.header_bytes - self.shape.other_bytes
        if total_bytes(smallest_mixture(options)) > left:
            return None
        return fit_bytes(options, left)

    def types_by_role(self, mixture: Mixture) -> dict[str, list[str]]:
        types: dict[str, list[str]] = {}
        for group in self.shape.groups:
            types.setdefault(group.role, []).append(mixture[group.name].type_name)
        return types


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed_gguf", description=__doc__)
    parser.add_argument("--model", choices=NAMES, default="tiny")
    parser.add_argument("--types", help="types of llama.cpp, separated by commas")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--probe-tokens", type=int, default=PROBE_TOKENS)
    parser.add_argument("--windows", type=int, default=48, help="windows of held-out text")
    parser.add_argument("--gptq", action="store_true", help="also with codes chosen by GPTQ")
    parser.add_argument("--work", type=Path, help="folder whose unfinished run is continued")
    parser.add_argument("--output", type=Path, help="result file")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = asked.work or Path(temporary)
        place.mkdir(exist_ok=True)
        calibration = CalibrationConfig(samples=asked.samples, seq_len=asked.seq_len)
        folder = model_folder(asked.model, place)
        model = MeasuredModel(folder, place, calibration, asked.probe_tokens)
        types = (asked.types or TYPES[asked.model]).split(",")
        found = compared(model, types, place, asked.windows, by_gptq=asked.gptq)
    print(table(HEAD, [one.cells for one in found]))
    record = {"model": asked.model, "windows": asked.windows}
    comparisons = [asdict(one) for one in found]
    save_record("mixed_gguf", arguments, record | {"comparisons": comparisons}, asked.output)


def save_record(
    benchmark: str, arguments: list[str] | None, record: dict[str, Any], output: Path | None
) -> None:
    """Write a result file with date, machine, versions and command. record: has its `model`."""
    now = datetime.now(UTC)
    about = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commands": [command(f"benchmarks.{benchmark}", arguments)],
    }
    name = f"{benchmark.replace('_', '-')}-{record['model']}-{now:%Y%m%d}.json"
    path = output or RESULTS / name
    path.write_text(json.dumps(about | record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)


def compared(
    model: MeasuredModel, types: Sequence[str], place: Path, num_windows: int, *, by_gptq: bool
) -> list[Comparison]:
    """Write all files and compare them."""
    wide = place / "16bit.gguf"
    model.write(wide, "F16")
    files, mixtures = [wide], dict[str, Mixture]()
    for name in types:
        stock, auto, gptq = (place / f"{side}{name}.gguf" for side in ("", "auto-", "gptq-"))
        model.write(stock, name)
        mixture = model.fit(stock.stat().st_size)
        assert mixture is not None, name
        mixtures[name] = mixture
        model.write(auto, "Q4_K_M", mixture)
        files += [stock, auto]
        if by_gptq and (codes := model.fit(stock.stat().st_size, by_gptq=True)) is not None:
            model.write_by_gptq(gptq, codes)
            files.append(gptq)
    kls = dict(zip(files[1:], window_kls(model.folder, files, num_windows), strict=True))
    found = []
    for name, mixture in mixtures.items():
        stock, auto, gptq = (place / f"{side}{name}.gguf" for side in ("", "auto-", "gptq-"))
        low, high = bootstrap_interval(kls[auto] - kls[stock])
        bits = 8 * (stock.stat().st_size - model.shape.header_bytes) / model.shape.num_weights
        one = Comparison(
            name, bits, stock.stat().st_size, auto.stat().st_size,
            float(kls[stock].mean()), float(kls[auto].mean()), low, high,
            total_kl(mixture), model.types_by_role(mixture),
        )  # fmt: skip
        if gptq in kls:
            low, high = bootstrap_interval(kls[gptq] - kls[auto])
            mean = float(kls[gptq].mean())
            one = replace(one, gptq_kl=mean, gptq_low=low, gptq_high=high)
        found.append(one)
    return found


def window_kls(folder: Path, files: Sequence[Path], num_windows: int) -> Array:
    """Mean KL divergence from the first file's distributions in each window of the held-out text:
    [other files, windows], in nats."""
    length, threads = 512, torch.get_num_threads()
    models = [
        Llama(
            str(path), n_ctx=length, n_batch=length, n_threads=threads, n_threads_batch=threads,
            logits_all=True, verbose=False,
        )
        for path in files
    ]  # fmt: skip
    tokenizer = HfTokenizer.from_folder(folder, models[0].n_vocab())
    windows = held_out_windows(None, tokenizer, length, num_windows).ids
    found = np.zeros((len(files) - 1, len(windows)))
    for index, ids in enumerate(windows.tolist()):
        reference = _log_shares(models[0], ids)
        shares = np.exp(reference)
        for other, model in enumerate(models[1:]):
            apart = (shares * (reference - _log_shares(model, ids))).sum(-1, dtype=np.float64)
            found[other, index] = apart.mean()
        print_progress(ProgressEvent("comparing", index + 1, len(windows), "steps"))
    for model in models:
        with closing(model):
            pass
    return found


def _log_shares(model: Llama, ids: list[int]) -> NDArray[np.float32]:
    """Log probabilities of the next tokens, [tokens, vocab]."""
    model.reset()  # type: ignore[no-untyped-call]
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], np.float32)
    logits -= logits.max(-1, keepdims=True)
    found: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def bootstrap_interval(differences: Array) -> tuple[float, float]:
    """95 % interval of the mean, by resampling windows."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(differences), (_RESAMPLES, len(differences)))
    low, high = np.percentile(differences[drawn].mean(-1), _INTERVAL)
    return float(low), float(high)


def print_progress(event: QuantizeEvent) -> None:
    """Print the progress to stderr."""
    if isinstance(event, ProgressEvent) and not event.current:
        print(f"{event.step}: {event.done} of {event.total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
