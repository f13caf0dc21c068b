"""The model card, README.md: what was done to a model, on what, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import localgen
from localgen.quant.files.packing import layout_of
from localgen.quant.preflight import Ready
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


def write_card(folder: Path, text: str) -> None:
    """Into a folder, in place of one that is there."""
    (folder / "README.md").write_text(text, encoding="utf-8")


def add_table(folder: Path, measured: Sequence[str]) -> None:
    """Append what was measured, lines of a table, to the card of a folder."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8")
    card.write_text("\n".join([text, "## Measured", "", *measured, ""]), encoding="utf-8")


def card_text(model: str, ready: Ready) -> str:
    """model: what the original is called."""
    recipe, windows = ready.recipe, ready.windows
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
        f"# {model}, {in_words(recipe)}",
        "",
        f"Made by `localgen quantize` {localgen.__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| method | {_METHODS[recipe.method]} |",
        f"| weights | {in_words(recipe)}; embedding, head, norms and routers in "
        f"{str(ready.dtype).removeprefix('torch.')} |",
        f"| layout | {_LAYOUTS[layout_of(recipe)]} |",
        f"| details | {_details(recipe)} |",
        f"| calibration | {calibration} |",
        "",
    ]
    return "\n".join(lines)


def in_words(recipe: Recipe) -> str:
    """Such as `awq, 4 bits in groups of 128`."""
    if not recipe.grouped:
        return recipe.method if recipe.method == "fp8" else f"{recipe.method}, int8"
    groups = f"groups of {recipe.group_size}" if recipe.group_size else "whole rows"
    return f"{recipe.method}, {recipe.bits} bits in {groups}"


def _details(recipe: Recipe) -> str:
    match recipe.method:
        case "awq":
            return f"range of each group {'searched' if recipe.clip else 'whole'}"
        case "gptq":
            order = "by the Hessian's diagonal" if recipe.desc_act else "as they are"
            return f"inputs {order}, damping {recipe.damping:g}"
        case "smoothquant":
            return f"alpha {recipe.alpha:g}, activations rounded for each token"
    return "–"
