"""Gumbel noise as a pure function of seed, position and token.

The random bits come from splitmix64 (Steele et al. 2014) and are the same in torch and in Triton:
the seed selects a stream, the position a number in it, which seeds a stream indexed by token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# splitmix64's odd constants; torch needs them as signed 64-bit integers
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TL_GOLDEN, _TL_MIX_1, _TL_MIX_2 = map(tl.constexpr, (_GOLDEN, _MIX_1, _MIX_2))
_UINT64_MASK = (1 << 64) - 1


@lru_cache(4096)
def hash_seed(seed: int) -> int:
    """Hash a seed, any integer, to a signed 64-bit integer."""
    x = (seed + _GOLDEN) & _UINT64_MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _UINT64_MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _UINT64_MASK
    return _to_int64(x ^ (x >> 31))


def random_bits(seed_hashes: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return 32 random bits per row and token, int64 [rows, vocab].

    seed_hashes: int64 [rows], from hash_seed. positions: int64 [rows].
    """
    start = _splitmix64(seed_hashes + positions + _to_int64(_GOLDEN))[:, None]
    tokens = torch.arange(1, vocab + 1, device=seed_hashes.device)
    return _logical_shift_right(_splitmix64(start + tokens * _to_int64(_GOLDEN)), 32)


def gumbel_noise(seed_hashes: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise per row and token, float32 [rows, vocab]."""
    bits = random_bits(seed_hashes, positions, vocab)
    # the largest noise comes from values near 0, where float32 is most precise
    uniform = ((bits.to(torch.float32) + 0.5) / 2**32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def uniform_noise(seed_hashes: Tensor, positions: Tensor) -> Tensor:
    """Return a uniform number in [0, 1) per row, float32 [rows], independent of `gumbel_noise`."""
    bits = _logical_shift_right(
        _splitmix64(_splitmix64(seed_hashes + positions + _to_int64(_GOLDEN))), 32
    )
    return (bits.to(torch.float32) / 2**32).clamp(max=1 - 2**-24)


def _splitmix64(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift_right(x, 30)) * _to_int64(_MIX_1)
    x = (x ^ _logical_shift_right(x, 27)) * _to_int64(_MIX_2)
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's >> is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _to_int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@triton.jit
def tl_random_bits(seed_hash, position, tokens):
    """`random_bits` in Triton, uint32 of the shape of tokens.

    seed_hash, position: int64 scalars. tokens: int32, any shape.
    """
    start = _tl_splitmix64((seed_hash + position).to(tl.uint64) + _TL_GOLDEN)
    return (_tl_splitmix64(start + (tokens + 1).to(tl.uint64) * _TL_GOLDEN) >> 32).to(tl.uint32)


@triton.jit
def tl_gumbel_noise(seed_hash, position, tokens):
    """`gumbel_noise` in Triton."""
    bits = tl_random_bits(seed_hash, position, tokens)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 2.0**-24)
    # log1p as log(w) * u / (w - 1): the rounding of w cancels (Goldberg 1991)
    left = 1.0 - uniform
    taken = 1.0 - left
    exact = -tl.log(left) * (uniform / tl.where(taken == 0.0, 1.0, taken))
    return -tl.log(tl.where(taken == 0.0, uniform, exact))


@triton.jit
def tl_uniform_noise(seed_hash, position):
    """`uniform_noise` of one row in Triton."""
    start = _tl_splitmix64((seed_hash + position).to(tl.uint64) + _TL_GOLDEN)
    bits = (_tl_splitmix64(start) >> 32).to(tl.uint32)
    return tl.minimum(bits.to(tl.float32) * (1.0 / 4294967296.0), 1.0 - 2.0**-24)


@triton.jit
def _tl_splitmix64(x):
    x = (x ^ (x >> 30)) * _TL_MIX_1
    x = (x ^ (x >> 27)) * _TL_MIX_2
    return x ^ (x >> 31)
