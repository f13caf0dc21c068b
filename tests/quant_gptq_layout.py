"""Writer of GPTQ's layout, which localgen reads, and wrote in earlier versions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from localgen.quant.files.packing import GroupedWeight


def gptq_parts(weight: GroupedWeight, zero_offset: int) -> dict[str, Tensor]:
    """A linear's tensors: a stream of bits down the inputs, and zeros along the outputs.

    zero_offset: subtracted from stored zero points: 1 in the first version of the layout.
    """
    bits, ins = weight.bits, weight.codes.shape[1]
    groups = weight.group_index
    if groups is None:
        groups = torch.arange(ins, dtype=torch.int32) // (ins // weight.scales.shape[1])
    stored = (weight.zeros.T.int() - zero_offset) & (2**bits - 1)
    return {
        "qweight": _packed(weight.codes.T, bits),
        "qzeros": _packed(stored.T, bits).T.contiguous(),
        "scales": weight.scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Each column as a stream of bits, lowest first: int32 [rows * bits / 32, columns]."""
    digits = (codes.numpy()[:, None].astype(np.int64) >> np.arange(bits)[:, None]) & 1
    stream = digits.reshape(-1, codes.shape[1]).astype(np.uint8)
    octets = np.packbits(stream, axis=0, bitorder="little")
    words = np.ascontiguousarray(octets.T).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(words.T))
