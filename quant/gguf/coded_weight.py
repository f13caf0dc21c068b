"""A linear's weight in a GGUF type with codes: ggml chooses the scales, GPTQ the codes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.quant.files.packing import GgufWeight
from localgen.quant.gguf.code_bits import group_grids, num_bits, with_codes
from localgen.quant.gguf.ggml_rounding import Array, pack, unpack
from localgen.quant.gguf.tensors import from_gguf_rows, to_gguf_rows
from localgen.quant.methods.gptq import HessianFactor, compensate_errors
from localgen.quant.methods.grid import QuantGrid, split_groups
from localgen.quant.methods.learned_rounding import MAX_OFFSET

# in place of the step of a group whose values are all the same: each rounds to code 0
_NO_STEP = 1e30


class CodedWeight:
    """Rows in the order of a file, and offsets before they are rounded to codes, in steps of the
    code: [out, groups, size]. The offsets are 0 at first, which gives GPTQ's codes, and can be
    learned: this is a LearnedWeight. Scales stay as ggml chose them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        linear: str,
        kind: str,
        target: Tensor,
        *,
        mean_squares: Array | None,
        factor: HessianFactor,
    ) -> None:
        """linear: last part of its name. kind: of CODE_TYPES. target: float32 [out, in], the weight
        to be rounded. mean_squares: [in], of the inputs, for the choice of the scales."""
        self._spec, self._linear, self._kind, self._device = spec, linear, kind, target.device
        rows = to_gguf_rows(spec, linear, to_array(target))
        self._packed = pack(rows, kind, mean_squares)
        base, step = (torch.from_numpy(each)[..., None] for each in group_grids(self._packed, kind))
        scales = torch.where(step == 0, _NO_STEP, step).to(self._device)
        self._base = base.to(self._device)
        bits = num_bits(kind)
        self._grid, self._top = QuantGrid(scales, torch.zeros_like(scales), bits), 2**bits - 1
        self._size = rows.shape[1] // base.shape[1]
        # without the values of code 0, so that all grids begin at 0
        shifted = split_groups(torch.from_numpy(rows).to(self._device), self._size) - self._base
        compensated = compensate_errors(shifted.flatten(1), self._grid, factor)
        self._rows = split_groups(compensated, self._size)
        self._offsets = torch.zeros_like(self._rows)

    def values(self) -> Tensor:
        codes = self._moved().clamp_(0, self._top)
        rows = codes.mul_(self._grid.scales).add_(self._base).flatten(1)
        return self._to_checkpoint(to_array(rows))

    def step(self, gradient: Tensor, rate: float) -> None:
        # of the rows or a positive multiple of it, whose sign counts
        array = to_gguf_rows(self._spec, self._linear, to_array(gradient))
        by_value = split_groups(torch.from_numpy(array).to(self._device), self._size)
        moved = self._moved()
        is_code = (moved >= 0) & (moved <= self._top)
        by_offset = (by_value * self._grid.scales).sign_().mul_(is_code)
        self._offsets.sub_(by_offset, alpha=rate).clamp_(-MAX_OFFSET, MAX_OFFSET)

    def round(self) -> GgufWeight:
        codes = self._moved().clamp_(0, self._top).flatten(1).to(torch.uint8)
        packed = with_codes(self._packed, codes.cpu().numpy(), self._kind)
        return GgufWeight(torch.from_numpy(packed), self._to_checkpoint(unpack(packed, self._kind)))

    def _moved(self) -> Tensor:
        """Nearest codes, also those that the type does not have."""
        return torch.round(self._rows / self._grid.scales + self._offsets)

    def _to_checkpoint(self, rows: Array) -> Tensor:
        return torch.from_numpy(from_gguf_rows(self._spec, self._linear, rows)).to(self._device)


def to_array(tensor: Tensor) -> Array:
    """float32, contiguous, on the CPU."""
    return np.ascontiguousarray(tensor.float().cpu().numpy())
