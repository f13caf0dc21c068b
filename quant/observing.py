"""What goes into each linear of a layer, for llama.cpp's importance matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.formats.hf.tensor_names import Tensors, linear_shapes
from localgen.quant.forward import LayerForward
from localgen.quant.moments import Importance, Inputs


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
