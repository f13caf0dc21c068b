"""Input importance of each linear of a layer, for llama.cpp's importance matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.files.layerwise_checkpoint import read_tensor_at, stored_tensors
from localgen.quant.files.safetensors_writer import streamed_tensor, write_safetensors

_COUNT_SUFFIX = ".count"


@dataclass(frozen=True, slots=True, eq=False)
class InputImportance:
    """sum_squares: float32 [in], sums of a linear's squared inputs over num_tokens tokens."""

    sum_squares: Tensor
    num_tokens: int


def write_importance(path: Path, by_linear: dict[str, InputImportance]) -> None:
    """by_linear: by names within the layer."""
    entries = {}
    for linear, one in by_linear.items():
        entries[linear] = streamed_tensor(one.sum_squares.cpu().float())
        entries[linear + _COUNT_SUFFIX] = streamed_tensor(torch.tensor([one.num_tokens]))
    write_safetensors(path, entries)


def read_importance(path: Path) -> dict[str, InputImportance]:
    """Inverse of `write_importance`. Raises LoadFailed if the file is damaged."""
    found = {name: read_tensor_at(place) for name, place in stored_tensors(path).items()}
    return {
        linear: InputImportance(squares, int(found[linear + _COUNT_SUFFIX]))
        for linear, squares in found.items()
        if not linear.endswith(_COUNT_SUFFIX)
    }


@torch.no_grad()
def collect_importance(layer: CalibrationLayer) -> dict[str, InputImportance]:
    """Importance by the name of the linear; experts without tokens are missing."""
    shapes = linear_shapes(layer.spec)
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(linear: str, x: Tensor) -> None:
        if linear not in shapes:  # a router
            return
        # float64: sums over tens of thousands of tokens
        sums = x.float().square().sum(0, dtype=torch.float64)
        squares[linear] = squares[linear] + sums if linear in squares else sums
        counts[linear] = counts.get(linear, 0) + len(x)

    layer.run_inputs(hook)
    return {name: InputImportance(sums.float(), counts[name]) for name, sums in squares.items()}
