"""The gate of an MLP: act(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional


def gated(x: Tensor, kind: Literal["silu", "gelu_tanh"]) -> Tensor:
    """x: [rows, 2 * size], gate then up -> [rows, size], computed in float32."""
    gate, up = x.float().chunk(2, -1)
    acted = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
    return (acted * up).to(x.dtype)
