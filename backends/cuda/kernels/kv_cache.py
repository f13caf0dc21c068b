"""One layer of the KV cache: unquantized, or 8-bit with one scale per token and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast

# largest magnitude of each 8-bit type
QUANTIZED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """KV cache of one layer. keys, values: [pages, kv heads, page tokens, head size].

    key_scales, value_scales: float32 [pages, kv heads, page tokens] if keys and values are 8-bit
    (int8 or float8_e4m3fn), else None. The dequantized vector is stored vector * scale.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        assert all(part.is_contiguous() for part in self.tensors)

    @classmethod
    def zeros(
        cls, shape: tuple[int, int, int, int], *, device: torch.device | str, dtype: torch.dtype
    ) -> LayerKV:
        """Allocate a zeroed layer. shape: that of `keys`."""

        def scales() -> Tensor | None:
            small = dtype in QUANTIZED_MAX
            return torch.zeros(shape[:3], device=device, dtype=torch.float32) if small else None

        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(keys, values, scales(), scales())

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors whose first dimension is pages."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return [part for part in parts if part is not None]


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize x, float32 [..., size], to 8 bits.

    Returns values [..., size] in dtype and scales, float32 [...].
    """
    scales = x.abs().amax(-1).clamp(min=1e-8) / QUANTIZED_MAX[dtype]
    scaled = x / scales[..., None]
    if dtype is torch.int8:
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(dtype), scales


def dequantize_kv(x: Tensor, scales: Tensor | None) -> Tensor:
    """Return the dequantized vectors, float32 (float64 if x is float64)."""
    return upcast(x) if scales is None else x.float() * scales[..., None]
