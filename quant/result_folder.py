"""Result folders: config.json, tokenizer files and model card, and notices about running them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import localgen
from localgen.backends.cuda.model.dequantize import dequantization_notes
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.folder import read_json
from localgen.backends.formats.hf.tensor_names import layer_names
from localgen.backends.units import format_count
from localgen.locked_file import LockedFile
from localgen.placement.backend_choice import detect_hardware
from localgen.quant.files.packing import packing_layout, quantization_config
from localgen.quant.preflight import PreparedQuantization
from localgen.quant.request.events import NoteEvent, OnEvent
from localgen.quant.request.recipe import Recipe

_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_LICENSE_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
_CARD = "README.md"
_LAYOUTS = {
    "awq": "AutoAWQ's GEMM layout (`quant_method: awq`)",
    "pack-quantized": "compressed-tensors, pack-quantized",
    "rows": "compressed-tensors",
}
_METHODS = {
    "rtn": "round to nearest",
    "awq": "AWQ: scales searched by output error, folded into the layer before (Lin et al. 2023)",
    "gptq": "GPTQ: rounding errors are compensated in later columns (Frantar et al. 2022), "
    "errors of the inputs too (Arai and Ichikawa 2025)",
    "smoothquant": "SmoothQuant: range moved from activations into weights (Xiao et al. 2022)",
    "fp8": "FP8 (e4m3), one scale per output channel",
}


def write_sidecar_files(folder: Path, model: str, prepared: PreparedQuantization) -> None:
    """Write all files but the weights. model: name of the original."""
    _copy_files(prepared.source.folder, folder)
    _write_config(folder, prepared)
    (folder / _CARD).write_text(_model_card(model, prepared), encoding="utf-8")


def append_results(folder: Path, table_lines: Sequence[str]) -> None:
    """Append an evaluation table to the model card."""
    card = LockedFile(folder / _CARD, mode=0o666)
    with card.locked():
        card.write("\n".join([card.read_text(), "## Measured", "", *table_lines, ""]))


def describe_recipe(recipe: Recipe) -> str:
    """Such as `awq, 3 bits in groups of 128, rounding learned in 200 steps`."""
    if not recipe.has_groups:
        return recipe.method if recipe.method == "fp8" else f"{recipe.method}, int8"
    groups = f"groups of {recipe.group_size}" if recipe.group_size else "whole rows"
    return f"{recipe.method}, {recipe.bits} bits in {groups}{describe_learning(recipe)}"


def describe_learning(recipe: Recipe) -> str:
    """Such as `, rounding learned in 200 steps`; empty if it is not learned."""
    steps = recipe.rounding_steps
    return f", rounding learned in {format_count(steps, 'step')}" if steps else ""


def report_backend_notes(folder: Path, on_event: OnEvent) -> None:
    """Emit notices about running a quantized folder on this machine."""
    why = detect_hardware().cuda_unavailable_reason
    if why is not None:
        on_event(
            NoteEvent(f"it runs on GPUs ({why} here); --backend cuda --device cpu runs it slowly")
        )
    spec = read_hf_config(folder)
    for note in dequantization_notes(spec.quant, has_experts=spec.moe is not None):
        on_event(NoteEvent(f"in localgen's engine {note}"))


def _copy_files(folder: Path, target: Path) -> None:
    """Copy tokenizer, template, settings and licence files."""
    for path in sorted(folder.iterdir()):
        wanted = path.suffix.lower() in _COPIED_SUFFIXES or path.name.upper().startswith(
            _LICENSE_PREFIXES
        )
        own = path.name == "config.json" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and wanted and not own:
            # contents: in the Hugging Face cache it is a link
            shutil.copyfile(path, target / path.name)


def _write_config(target: Path, prepared: PreparedQuantization) -> None:
    config = read_json(prepared.source.folder / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = _dtype_name(prepared)
    router = layer_names(prepared.source.spec).router
    unquantized = [] if router is None else [router.rpartition(".")[2]]
    config["quantization_config"] = quantization_config(prepared.recipe, unquantized)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def _dtype_name(prepared: PreparedQuantization) -> str:
    return str(prepared.dtype).removeprefix("torch.")


def _model_card(model: str, prepared: PreparedQuantization) -> str:
    recipe, windows = prepared.recipe, prepared.windows
    calibration = "none"
    if windows is not None:
        count, length = windows.ids.shape
        calibration = f"{count} sequences of {length} tokens, {windows.source}"
    lines = [
        "---",
        f"base_model: {model}",
        "base_model_relation: quantized",
        "library_name: transformers",
        "---",
        "",
        f"# {model}, {describe_recipe(recipe)}",
        "",
        f"Made by `localgen quantize` {localgen.__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| method | {_METHODS[recipe.method]} |",
        f"| weights | {describe_recipe(recipe)}; embedding, head, norms and routers in "
        f"{_dtype_name(prepared)} |",
        f"| layout | {_LAYOUTS[packing_layout(recipe)]} |",
        f"| details | {_method_details(recipe)} |",
        f"| calibration | {calibration} |",
        "",
    ]
    return "\n".join(lines)


def _method_details(recipe: Recipe) -> str:
    match recipe.method:
        case "awq":
            return f"range of each group {'searched' if recipe.clip else 'whole'}"
        case "gptq":
            order = "by the Hessian's diagonal" if recipe.desc_act else "as they are"
            corrected = f"{recipe.asymmetry:.0%} of input errors corrected"
            return f"inputs {order}, damping {recipe.damping:g}, {corrected}"
        case "smoothquant":
            return f"alpha {recipe.alpha:g}, activations rounded for each token"
    return "–"
