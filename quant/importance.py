"""How much each input of a layer's linears matters, kept in a file until all layers are known."""

from __future__ import annotations

from pathlib import Path

import torch

from localgen.quant.moments import Importance
from localgen.quant.source import headers, stored_tensor
from localgen.quant.tensor_file import entry_of, write

_COUNT = ".count"


def write_importance(path: Path, importance: dict[str, Importance]) -> None:
    """By the names of linears within the layer."""
    entries = {}
    for linear, one in importance.items():
        entries[linear] = entry_of(one.squares.cpu().float())
        entries[linear + _COUNT] = entry_of(torch.tensor([one.count]))
    write(path, entries)


def read_importance(path: Path) -> dict[str, Importance]:
    """What was written. LoadFailed: the file is damaged."""
    found = {name: stored_tensor(place) for name, place in headers(path).items()}
    return {
        linear: Importance(squares, int(found[linear + _COUNT]))
        for linear, squares in found.items()
        if not linear.endswith(_COUNT)
    }
