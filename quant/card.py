"""The model card, README.md: what was done to a model, on what, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import localgen
from localgen.quant.files.packing import packing_layout
from localgen.quant.preflight import PreparedQuantization
from localgen.quant.request.recipe import Recipe

_LAYOUTS = {
    "awq": "AutoAWQ's GEMM layout (`quant_method: awq`)",
    "gptq": "GPTQ's layout (`quant_method: gptq`)",
    "compressed-tensors": "compressed-tensors",
}
_METHODS = {
    "rtn": "round to nearest",
    "awq": "AWQ: scales searched by output error, folded into what comes before (Lin et al. 2023)",
    "gptq": "GPTQ: each rounding makes up for those before it (Frantar et al. 2022)",
    "smoothquant": "SmoothQuant: range moved from activations into weights (Xiao et al. 2022)",
    "fp8": "FP8 (e4m3), a scale for each output",
}


def write_model_card(folder: Path, text: str) -> None:
    """Into a folder, in place of one that is there."""
    (folder / "README.md").write_text(text, encoding="utf-8")


def append_results(folder: Path, table_lines: Sequence[str]) -> None:
    """Append what was measured, lines of a table, to the card of a folder."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    card.write_text("\n".join([text, "## Measured", "", *table_lines, ""]), encoding="utf-8")


def render_model_card(model: str, prepared: PreparedQuantization) -> str:
    """model: what the original is called."""
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
        f"{str(prepared.dtype).removeprefix('torch.')} |",
        f"| layout | {_LAYOUTS[packing_layout(recipe)]} |",
        f"| details | {_method_details(recipe)} |",
        f"| calibration | {calibration} |",
        "",
    ]
    return "\n".join(lines)


def describe_recipe(recipe: Recipe) -> str:
    """Such as `awq, 4 bits in groups of 128`."""
    if not recipe.has_groups:
        return recipe.method if recipe.method == "fp8" else f"{recipe.method}, int8"
    groups = f"groups of {recipe.group_size}" if recipe.group_size else "whole rows"
    return f"{recipe.method}, {recipe.bits} bits in {groups}"


def _method_details(recipe: Recipe) -> str:
    match recipe.method:
        case "awq":
            return f"range of each group {'searched' if recipe.clip else 'whole'}"
        case "gptq":
            order = "by the Hessian's diagonal" if recipe.desc_act else "as they are"
            return f"inputs {order}, damping {recipe.damping:g}"
        case "smoothquant":
            return f"alpha {recipe.alpha:g}, activations rounded for each token"
    return "–"
