"""Load quantized folders with libraries that localgen does not contain, and compare logits.

python -m benchmarks.foreign_loaders --python ENV/bin/python [--loader transformers|vllm]
                                     [--model tiny|smollm2] [--only gptq-4,rtn-3]

ENV has the library: transformers with gptqmodel, optimum and compressed-tensors, or vLLM.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.evaluated_model import MODEL
from benchmarks.measure import ModelLine, Report, command
from benchmarks.quality import SMOLLM2_GROUP
from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import PACKAGED_MODELS, packaged_model
from localgen.machine.python_process import last_line
from localgen.quant import evaluate
from localgen.quant.calibrate.text_windows import held_out_windows
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.recipe import CalibrationConfig, Recipe

PARTS = Path(__file__).parent / "foreign_parts"
RECIPES = {
    f"{method}-{bits}": Recipe(method=method, bits=bits)
    for bits in (4, 3, 8)
    for method in ("rtn", "awq", "gptq")
} | {"fp8": Recipe(method="fp8", bits=8), "smoothquant": Recipe(method="smoothquant", bits=8)}
# few: the folders are to be read, not to be good
CALIBRATION = CalibrationConfig(samples=8, seq_len=128)
WINDOWS, LENGTH = 2, 64
# arithmetic in another order, or in 16 bits; activations of smoothquant have other steps
MOST_MNATS = {"smoothquant": 10.0}
MOST_MNATS_OTHERS = 1.0


@contextmanager
def original(name: str) -> Iterator[tuple[Path, dict[str, Recipe]]]:
    """Yield the folder of a packaged model in 16 bits or more, and the recipes that fit it."""
    if name == BUILT_IN_MODEL:
        yield MODEL, RECIPES
        return
    # transformers is imported only where smollm2 is measured
    from benchmarks.agreement_parts.logits import transformers_model

    path = packaged_model(name).path
    source = open_gguf_source(path)
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(path, source.spec).save_pretrained(folder)
        # any valid tokens do
        for part in MODEL.glob("tokenizer*"):
            (Path(folder) / part.name).write_bytes(part.read_bytes())
        yield (
            Path(folder),
            {key: replace(one, group_size=SMOLLM2_GROUP) for key, one in RECIPES.items()},
        )


def our_log_shares(folder: Path, ids: Tensor) -> Tensor:
    """float32 [windows, length, vocab], of the weights as written."""
    read = evaluate.compute_final_states(LayerwiseCheckpoint(folder), ids)
    every = [evaluate.window_logits(read, index) for index in range(len(ids))]
    return torch.stack(every).log_softmax(-1)


def their_log_shares(python: str, loader: str, folder: Path, ids: Path) -> tuple[Tensor, str]:
    """As our_log_shares, and the versions of their libraries. Raises RuntimeError if they fail."""
    out = ids.with_name("out.npy")
    script = PARTS / f"{loader}_log_shares.py"
    with tempfile.TemporaryFile() as errors:
        run = subprocess.run(
            [python, str(script), str(folder), str(ids), str(out)],
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(last_line(errors, f"exit status {run.returncode}"))
    versions = json.loads(run.stdout.splitlines()[-1])
    return torch.from_numpy(np.load(out)), ", ".join(f"{k} {v}" for k, v in versions.items())


def compare(report: Report, name: str, ours: Tensor, theirs: Tensor) -> None:
    """Report KL divergence and equal best tokens, where both have a distribution."""
    width = min(ours.shape[-1], theirs.shape[-1])
    known = theirs[..., :width].isfinite().all(-1)
    p, q = ours[..., :width][known], theirs[..., :width][known]
    nats = functional.kl_div(q, p, reduction="batchmean", log_target=True)
    found = report.add("KL divergence", name, "mnats", [1e3 * float(nats)])
    report.most(found, MOST_MNATS.get(name, MOST_MNATS_OTHERS))
    report.add("log probabilities apart, at most", name, "nats", [float((p - q).abs().max())])
    report.add("same best token", name, "", [float((p.argmax(-1) == q.argmax(-1)).double().mean())])


def measure(options: argparse.Namespace) -> Report:
    """Quantize, load and compare."""
    libraries = set()
    with original(options.model) as (folder, recipes), tempfile.TemporaryDirectory() as work:
        source = LayerwiseCheckpoint(folder)
        spec = source.spec
        line = ModelLine(f"localgen {options.model}", source.size_bytes, spec.num_params)
        report = Report(line, 1, options.only is not None, torch.get_num_threads(), {})
        tokenizer = HfTokenizer.from_folder(folder, spec.vocab_size)
        ids = held_out_windows(None, tokenizer, LENGTH, WINDOWS).ids
        np.save(Path(work) / "ids.npy", ids.numpy())
        for name, recipe in recipes.items():
            if options.only is not None and name not in options.only.split(","):
                continue
            out = Path(work) / name
            ready = prepare_quantization(folder, recipe, CALIBRATION, "cpu")
            QuantizeJob(options.model, ready, out).run(lambda _: None, resume=False)
            try:
                theirs, versions = their_log_shares(
                    options.python, options.loader, out, Path(work) / "ids.npy"
                )
            except RuntimeError as error:
                report.not_compared.append(f"{name}: {error}")
                print(f"{name}: {error}", file=sys.stderr)
                continue
            libraries.add(versions)
            compare(report, name, our_log_shares(out, ids), theirs)
            print(f"{name}: loaded", file=sys.stderr)
    report.commands.extend(f"with {one}" for one in sorted(libraries))
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a target is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign_loaders")
    parser.add_argument("--python", required=True, help="interpreter of the environment")
    parser.add_argument("--loader", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--model", choices=PACKAGED_MODELS, default=BUILT_IN_MODEL)
    parser.add_argument("--only", help="names of recipes, separated by commas")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    report = measure(options)
    report.commands.insert(0, command("benchmarks.foreign_loaders", arguments))
    print(report.text())
    report.save("foreign-loaders", options.output)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
