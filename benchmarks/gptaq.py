"""GPTAQ (Li et al. 2025) beside localgen's correction of inputs, for benchmarks.constants.

It corrects the error of each input in the inputs that are rounded after it, from the weight as it
is when its turn comes, where localgen moves all weights before any is rounded.
"""

from __future__ import annotations

from torch import Tensor

from localgen.quant.files.packing import GroupedWeight
from localgen.quant.methods.gptq import HessianFactor
from localgen.quant.methods.grid import QuantGrid, split_groups


class Gptaq:
    """In place of correct_inputs and round_gptq, which are called in turns."""

    def correct_inputs(
        self, weight: Tensor, mismatch: Tensor, hessian_factor: HessianFactor, share: float
    ) -> Tensor:
        """Keep what the next rounding needs. mismatch: as in localgen's."""
        order, upper = hessian_factor.column_order, hessian_factor.inverse_upper
        led_on = (mismatch[order[:, None], order] @ upper.t()).triu_(1)
        self._spread = (led_on @ upper).mul_(share)
        return weight

    def round_gptq(
        self, weight: Tensor, grid: QuantGrid, hessian_factor: HessianFactor
    ) -> GroupedWeight:
        """Round a weight [out, in] on a grid [out, groups, 1]."""
        order, upper = hessian_factor.column_order, hessian_factor.inverse_upper
        columns = weight.t()[order]
        size = weight.shape[1] // grid.scales.shape[1]
        for at, column in enumerate(order.tolist()):
            of_group = grid.scales[:, column // size, 0], grid.zeros[:, column // size, 0]
            value = QuantGrid(*of_group, grid.bits).fake_quantize(columns[at])
            error = (columns[at] - value) / upper[at, at]
            columns[at + 1 :].addr_(upper[at, at + 1 :], error, alpha=-1)
            columns[at + 1 :].addr_(self._spread[at, at + 1 :], columns[at])
        return grid.round(split_groups(columns[order.argsort()].t().contiguous(), size))
