"""Measure seconds per layer and peak memory of `localgen quantize`, next to its own estimate.

python -m benchmarks.quantize [--quick] [--methods rtn,awq,gptq,gguf-auto] [--layers 4]
    [--rounding-steps 0]

The model is random, of Llama-3.2-1B's shape, in bfloat16: time and memory do not depend on the
weights, and the result is not evaluated. All layers have the same size: four are enough for the
time per layer and its estimate, while the full model shows the growth of memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import RESULTS, machine
from benchmarks.random_gguf import EMBEDDING_STD, SHAPES, LlamaShape
from localgen.hub.packaged import BUILT_IN_PATH
from localgen.machine.python_process import python_command, python_environment
from localgen.quant.files.safetensors_writer import StreamedTensor, write_safetensors
from localgen.quant.request.recipe import LEARNING_METHODS

_METHODS = "rtn,fp8,awq,gptq"
_UNCALIBRATED = ("rtn", "fp8")
_MIXED = "gguf-auto"
_PIECE_ROWS = 4096
_QUICK = ("--samples", "4", "--seq-len", "64")


@dataclass(frozen=True, slots=True)
class QuantizeFigures:
    """Figures of a run of `localgen quantize`.

    estimated_layer_s: estimated before the run; None for few layers.
    peak_bytes: peak resident memory of the process, from the command's report. The parent cannot
    measure it, because a child's maximum is never below the parent's.
    """

    method: str
    layers: int
    layer_s: float
    peak_bytes: int
    estimated_bytes: int
    estimated_layer_s: float | None = None

    @property
    def row(self) -> str:
        ratio = self.estimated_bytes / self.peak_bytes
        said = "" if self.estimated_layer_s is None else f"{self.estimated_layer_s:.1f}"
        return (
            f"| {self.method} | {self.layers} | {self.layer_s:.1f} | {said} | "
            f"{self.peak_bytes / 1e9:.2f} | "
            f"{self.estimated_bytes / 1e9:.2f} ({ratio - 1:+.0%}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to check that the benchmark runs"
    )
    parser.add_argument("--methods", default=_METHODS)
    parser.add_argument("--samples", default="128")
    parser.add_argument("--seq-len", default="512")
    parser.add_argument("--rounding-steps", help="of awq and gptq (default: as `quantize` has it)")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 16)")
    parser.add_argument("--output", type=Path, help="result file")
    asked = parser.parse_args()
    shape = SHAPES["quick" if asked.quick else "1b"]
    shape = replace(shape, layers=asked.layers or shape.layers)
    more = _QUICK if asked.quick else ("--samples", asked.samples, "--seq-len", asked.seq_len)
    steps = ("--rounding-steps", asked.rounding_steps) if asked.rounding_steps else ()
    print("| method | layers | s a layer | estimated s | peak GB | estimated GB |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as place:
        model = random_folder(shape, Path(place))
        found = []
        for method in asked.methods.split(","):
            options = () if method in _UNCALIBRATED else more
            found.append(
                measured(method, model, options + (steps if method in LEARNING_METHODS else ()))
            )
            print(found[-1].row, flush=True)
    if not asked.quick:
        _save(found, more + steps, asked.output)


def measured(method: str, model: Path, more: tuple[str, ...]) -> QuantizeFigures:
    """Run `localgen quantize` in a separate process. Raises RuntimeError if it fails."""
    is_mixed = method == _MIXED
    out = model.with_name(f"{model.name}-{method}" + (".gguf" if is_mixed else ""))
    options = ["--gguf", "auto", "--target-bpw", "4"] if is_mixed else [f"--{method}"]
    asked = [str(model), *options, "--out", str(out), "--no-eval", "--json", *more]
    command = python_command("localgen.cli.main", "quantize", *asked)
    ran = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, check=False)
    shutil.rmtree(out, ignore_errors=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {ran.returncode}")
    record = json.loads(ran.stdout)
    if is_mixed:
        return _mixed_figures(record["mixture"])
    estimated_s = record["estimated_s"]
    return QuantizeFigures(
        method=method,
        layers=record["layers"],
        layer_s=record["layer_s"],
        peak_bytes=record["peak_bytes"],
        estimated_bytes=round(record["estimated_bytes"]),
        estimated_layer_s=None if estimated_s is None else estimated_s / record["layers"],
    )


def _mixed_figures(mixture: dict[str, Any]) -> QuantizeFigures:
    """A layer's time is that of the probes, without the importance matrix and the file."""
    layers = len(mixture["types"]["attn_q"])
    return QuantizeFigures(
        method=_MIXED,
        layers=layers,
        layer_s=mixture["probes_s"] / layers,
        peak_bytes=mixture["peak_bytes"],
        estimated_bytes=mixture["estimated_bytes"],
        estimated_layer_s=mixture["estimated_s"] / layers,
    )


def random_folder(shape: LlamaShape, place: Path) -> Path:
    """Write a Hugging Face model folder with random weights and the built-in model's tokenizer."""
    folder = place / f"random-{shape.name}"
    folder.mkdir()
    for path in BUILT_IN_PATH.with_suffix("").glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", entries(shape))
    return folder


def config_of(shape: LlamaShape) -> dict[str, object]:
    """Return the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        # at least the size of the tokenizer's vocabulary
        "vocab_size": max(shape.vocab, 4096),
        "max_position_embeddings": shape.ctx,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def entries(shape: LlamaShape) -> dict[str, StreamedTensor]:
    """Return all tensors by name; their values are generated while they are written."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    linears = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    found = {
        "model.embed_tokens.weight": _normal(max(shape.vocab, 4096), shape.hidden),
        "model.norm.weight": _ones(shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = _ones(shape.hidden)
        for name, (outs, ins) in linears.items():
            found[f"{at}{name}.weight"] = _normal(outs, ins)
    return found


def _normal(rows: int, width: int) -> StreamedTensor:
    def pieces() -> Iterator[Tensor]:
        made = torch.Generator().manual_seed(rows + width)
        for first in range(0, rows, _PIECE_ROWS):
            count = min(_PIECE_ROWS, rows - first)
            yield torch.randn(count, width, generator=made).mul_(EMBEDDING_STD).bfloat16()

    return StreamedTensor(torch.bfloat16, (rows, width), pieces)


def _ones(size: int) -> StreamedTensor:
    return StreamedTensor(
        torch.bfloat16, (size,), lambda: (torch.ones(size, dtype=torch.bfloat16),)
    )


def _save(found: list[QuantizeFigures], more: tuple[str, ...], target: Path | None) -> None:
    today = datetime.date.today()
    record = {
        "date": today.isoformat(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "options": more,
        "runs": [asdict(one) for one in found],
    }
    path = target or RESULTS / f"quantize-{today:%Y%m%d}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
