"""What goes into each linear of a layer, for llama.cpp's importance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.input_stats import InputImportance, LayerInputs
from localgen.quant.calibrate.layer_forward import LayerForward
from localgen.quant.files.layerwise_checkpoint import read_safetensors_header, read_tensor_at
from localgen.quant.files.safetensors_writer import streamed_tensor, write_safetensors

_COUNT_SUFFIX = ".count"


def write_importance(path: Path, by_linear: dict[str, InputImportance]) -> None:
    """By the names of linears within the layer."""
    entries = {}
    for linear, one in by_linear.items():
        entries[linear] = streamed_tensor(one.sum_squares.cpu().float())
        entries[linear + _COUNT_SUFFIX] = streamed_tensor(torch.tensor([one.num_tokens]))
    write_safetensors(path, entries)


def read_importance(path: Path) -> dict[str, InputImportance]:
    """What was written. LoadFailed: the file is damaged."""
    found = {name: read_tensor_at(place) for name, place in read_safetensors_header(path).items()}
    return {
        linear: InputImportance(squares, int(found[linear + _COUNT_SUFFIX]))
        for linear, squares in found.items()
        if not linear.endswith(_COUNT_SUFFIX)
    }


@torch.no_grad()
def collect_importance(
    index: int, tensors: LayerTensors, inputs: LayerInputs, forward: LayerForward
) -> dict[str, InputImportance]:
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
    return {name: InputImportance(sums.float(), counts[name]) for name, sums in squares.items()}
