"""What goes into each linear of a layer, for llama.cpp's importance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.formats.hf.tensor_names import Tensors, linear_shapes
from localgen.quant.calibrate.input_stats import Importance, Inputs
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.files.layerwise_checkpoint import headers, stored_tensor
from localgen.quant.files.safetensors_writer import entry_of, write

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


@torch.no_grad()
def observed(
    index: int, tensors: Tensors, inputs: Inputs, forward: LayerForward
) -> dict[str, Importance]:
    """By the name of a linear within layer `index`; an expert that no token was routed to is not
    among them."""
    shapes = linear_shapes(forward.spec)
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def tap(linear: str, x: Tensor) -> None:
        if linear not in shapes:  # a router
            return
        # in double: sums of tens of thousands of tokens
        sums = x.float().square().sum(0, dtype=torch.float64)
        squares[linear] = squares[linear] + sums if linear in squares else sums
        counts[linear] = counts.get(linear, 0) + len(x)

    for hidden in inputs():
        forward.run(index, tensors, hidden, tap)
    return {name: Importance(sums.float(), counts[name]) for name, sums in squares.items()}
