"""Linear layers: dense, int4, FP8, and several merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.activation import gated_activation
from localgen.backends.cuda.kernels.dispatch import Kernel
from localgen.backends.cuda.kernels.fp8_rows import Fp8Rows, quantize_rows_fp8
from localgen.backends.cuda.kernels.gemm.dense import gated_matmul, matmul, normed
from localgen.backends.cuda.kernels.gemm.fp8 import (
    choose_fp8_kernel,
    dequantize_fp8,
    fp8_matmul,
    fp8_rows_matmul,
)
from localgen.backends.cuda.kernels.gemm.int4 import int4_gated_matmul, int4_matmul
from localgen.backends.cuda.kernels.gemm.int4_format import dequantize_int4
from localgen.backends.cuda.kernels.gemm.tile import ActivationKind
from localgen.backends.cuda.kernels.norm import RMSNorm


class Linear(Protocol):
    """A linear layer: x [rows, in_features] -> [rows, out_features], in x's dtype."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear:
    """An unquantized linear layer. weight: [out, in]. bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return matmul(x, self.weight, self.bias, residual)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Linear:
    """A linear layer with 4-bit weights; groups of inputs share scale and zero: (q - zero) * scale.

    packed: uint8 [out, in / 2], packed by kernels.gemm.int4_format.pack_int4.
    grid: float [out, in / group, 2], scales and zeros, packed by pack_grid.
    bias: [out] or None.
    input_order: int64 [in] or None; packed column i belongs to input input_order[i].
    """

    packed: Tensor
    grid: Tensor
    bias: Tensor | None = None
    input_order: Tensor | None = None

    @property
    def in_features(self) -> int:
        return 2 * self.packed.shape[1]

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.in_features // self.grid.shape[1]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x if self.input_order is None else x[:, self.input_order]
        return int4_matmul(x, self.packed, self.grid, self.bias, residual)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight, [out, in], with columns in packed order."""
        return dequantize_int4(self.packed, self.grid, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """A linear layer with FP8 weights.

    weight: float8_e4m3fn [out, in]. scale: float32 [out], per output. bias: [out] or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_matmul(x, self.weight, self.scale, self.bias)

    def multiply_rows(self, x: Fp8Rows) -> Tensor:
        """As for a tensor."""
        return fp8_rows_matmul(x, self.weight, self.scale, self.bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight, [out, in]."""
        return dequantize_fp8(self.weight, self.scale, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class MergedLinear:
    """Linears over the same input whose weights cannot be merged; concatenates their outputs."""

    parts: tuple[Linear, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def takes_fp8_rows(linear: Linear | None, x: Tensor) -> bool:
    """True if the linear rounds its inputs to FP8, so that their kernel can do so.

    x: any tensor with the inputs' device, dtype and number of rows.
    """
    if not isinstance(linear, Fp8Linear):
        return False
    return choose_fp8_kernel(x, linear.weight) is Kernel.FP8_SCALED_MM


def project(linear: Linear, x: Tensor | Fp8Rows) -> Tensor:
    """The linear's outputs. x: Fp8Rows if `takes_fp8_rows`."""
    if isinstance(x, Tensor):
        return linear(x)
    assert isinstance(linear, Fp8Linear)
    return linear.multiply_rows(x)


def gated_mlp(
    gate_up: Linear, down: Linear, x: Tensor | Fp8Rows, activation: ActivationKind
) -> Tensor:
    """down(act(gate) * up). gate_up: linear whose outputs are all of gate, then all of up."""
    if isinstance(x, Tensor) and not takes_fp8_rows(down, x):
        return down(gated_linear(gate_up, x, activation))
    both = project(gate_up, x)
    if takes_fp8_rows(down, both):
        return project(down, quantize_rows_fp8(both, activation))
    return down(gated_activation(both, activation))


def gated_linear(
    gate_up: Linear, x: Tensor, activation: ActivationKind, norm: RMSNorm | None = None
) -> Tensor:
    """act(gate) * up of norm(x), [rows, out / 2].

    gate_up: linear whose outputs are all of gate, then all of up.
    """
    match gate_up:
        case DenseLinear(weight, bias=None):
            return gated_matmul(x, weight, activation, norm=norm)
        case Int4Linear(packed, grid, bias=None, input_order=None):
            return int4_gated_matmul(x, packed, grid, activation, norm=norm)
    return gated_activation(gate_up(normed(x, norm)), activation)


def merge_linears(parts: Sequence[Linear]) -> Linear:
    """Merge linears over the same input into one; outputs are concatenated in order.

    Weights are concatenated if their layouts match; otherwise returns a MergedLinear.
    """
    assert len({part.in_features for part in parts}) == 1
    if len(parts) == 1:
        return parts[0]
    dense = [part for part in parts if isinstance(part, DenseLinear)]
    if len(dense) == len(parts):
        return DenseLinear(torch.cat([part.weight for part in dense]), _biases(dense))
    fp8 = [part for part in parts if isinstance(part, Fp8Linear)]
    if len(fp8) == len(parts):
        # torch.cat does not support FP8 on every device, so concatenate bytes
        weight = torch.cat([part.weight.view(torch.uint8) for part in fp8])
        scale = torch.cat([part.scale for part in fp8])
        return Fp8Linear(weight.view(torch.float8_e4m3fn), scale, _biases(fp8))
    int4_parts = [part for part in parts if isinstance(part, Int4Linear)]
    if len(int4_parts) == len(parts) and _same_groups(int4_parts):
        return Int4Linear(
            packed=torch.cat([part.packed for part in int4_parts]),
            grid=torch.cat([part.grid for part in int4_parts]),
            bias=_biases(int4_parts),
            input_order=int4_parts[0].input_order,
        )
    return MergedLinear(tuple(parts))


def reorder_outputs(linear: Linear, order: Tensor) -> Linear:
    """Return a copy whose output i is output order[i] of `linear`. order: int64 [out]."""
    assert isinstance(linear, DenseLinear | Int4Linear | Fp8Linear)
    bias = None if linear.bias is None else linear.bias[order.to(linear.bias.device)]
    match linear:
        case DenseLinear(weight):
            return DenseLinear(weight[order.to(weight.device)], bias)
        case Fp8Linear(weight, scale):
            order = order.to(weight.device)
            # torch does not index FP8 on every device, so index bytes
            rows = weight.view(torch.uint8)[order].view(weight.dtype)
            return Fp8Linear(rows, scale[order], bias)
        case Int4Linear(packed, grid):
            order = order.to(packed.device)
            return Int4Linear(packed[order], grid[order], bias, linear.input_order)


def _biases(parts: Sequence[DenseLinear | Int4Linear | Fp8Linear]) -> Tensor | None:
    given = [part.bias for part in parts if part.bias is not None]
    if not given:
        return None
    return torch.cat(
        [
            given[0].new_zeros(part.out_features) if part.bias is None else part.bias
            for part in parts
        ]
    )


def _same_groups(parts: Sequence[Int4Linear]) -> bool:
    first = parts[0]
    return all(_same_order(part.input_order, first.input_order) for part in parts) and all(
        (part.group_size, part.grid.dtype) == (first.group_size, first.grid.dtype) for part in parts
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
