"""One layer of the KV cache, exact or in eight bits with a scale for each token and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast

# the largest magnitude that each eight-bit type holds
QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """keys, values: [pages, kv heads, page tokens, size].

    key_scales, value_scales: float32 [pages, kv heads, page tokens] where keys and values are
    eight bits wide (int8 or float8_e4m3fn): what was stored is values * scale. Else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], *, device: torch.device | str, dtype: torch.dtype
    ) -> LayerKV:
        """An empty one. shape: as that of keys."""

        def scales() -> Tensor | None:
            small = dtype in QUANTIZED_MAX
            return torch.zeros(shape[:3], device=device, dtype=torch.float32) if small else None

        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(keys, values, scales(), scales())

    @property
    def tensors(self) -> list[Tensor]:
        """All that has pages as its first dimension."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return [part for part in parts if part is not None]


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, float32 [..., size], in eight bits: [..., size] of dtype and scales, float32 [...]."""
    scales = x.abs().amax(-1).clamp(min=1e-8) / QUANTIZED_MAX[dtype]
    scaled = x / scales[..., None]
    if dtype is torch.int8:
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(dtype), scales


def dequantize_kv(x: Tensor, scales: Tensor | None) -> Tensor:
    """What was stored, float32 or float64."""
    return upcast(x) if scales is None else x.float() * scales[..., None]
