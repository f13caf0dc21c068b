"""Tensor parallelism: the shard of every tensor that a rank holds.

Projections into heads and into the MLP are column parallel, those back row parallel, so each layer
needs two all-reduces (Shoeybi et al. 2019). Embedding and head are split by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_spec import ModelSpec

Range = tuple[int, int]
_ShardedDim = Literal["heads", "kv_heads", "qkv", "mlp", "gate_up", "vocab"]

# the dimension of a linear's outputs, by its name in safetensors and in GGUF files
_COLUMN_PARALLEL: dict[str, _ShardedDim] = {
    "q_proj": "heads",
    "attn_q": "heads",
    "k_proj": "kv_heads",
    "attn_k": "kv_heads",
    "v_proj": "kv_heads",
    "attn_v": "kv_heads",
    "qkv_proj": "qkv",
    "attn_qkv": "qkv",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "w1": "mlp",
    "w3": "mlp",
    "ffn_gate": "mlp",
    "ffn_up": "mlp",
    "ffn_gate_exps": "mlp",
    "ffn_up_exps": "mlp",
    "gate_up_proj": "gate_up",
    "embed_tokens": "vocab",
    "token_embd": "vocab",
    "lm_head": "vocab",
    "output": "vocab",
}
# the dimension of the inputs of a linear whose outputs are summed over the ranks
_ROW_PARALLEL: dict[str, _ShardedDim] = {
    "o_proj": "heads",
    "attn_output": "heads",
    "down_proj": "mlp",
    "w2": "mlp",
    "ffn_down": "mlp",
    "ffn_down_exps": "mlp",
}
# a rank's tokens are a multiple of this: eight 4-bit values are packed in a word
_VOCAB_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The part of a tensor that a rank holds: `ranges` of `num_parts` equal parts of `axis`."""

    axis: int
    ranges: tuple[Range, ...]
    num_parts: int

    def shard_shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._scaled_shape(full_shape, self._num_kept, self.num_parts)

    def full_shape(self, shard_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._scaled_shape(shard_shape, self.num_parts, self._num_kept)

    def slices(self, length: int) -> list[slice]:
        """The ranges as slices of an axis of `length`."""
        return [
            slice(first * length // self.num_parts, end * length // self.num_parts)
            for first, end in self.ranges
        ]

    def slice_tensor(self, source: Any) -> Tensor:
        """Return a copy of the shard of a tensor, or of a slice of a safetensors file."""
        before = (slice(None),) * self.axis
        length = (source.shape if isinstance(source, Tensor) else source.get_shape())[self.axis]
        parts = [source[(*before, kept)] for kept in self.slices(length)]
        return torch.cat(parts, self.axis)

    @property
    def _num_kept(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def _scaled_shape(self, shape: tuple[int, ...], factor: int, divisor: int) -> tuple[int, ...]:
        return (*shape[: self.axis], shape[self.axis] * factor // divisor, *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The shard of a model that rank `rank` of `tp_size` holds.

    spec: of the whole model, which must be divisible by tp_size (see ensure_divisible). Rank 0 of 1
    holds the whole model.
    """

    spec: ModelSpec
    rank: int = 0
    tp_size: int = 1

    @property
    def local_spec(self) -> ModelSpec:
        """The spec of this rank's shard."""
        if self.tp_size == 1:
            return self.spec
        spec, moe = self.spec, self.spec.moe
        first, end = self.vocab_range
        return replace(
            spec,
            num_heads=spec.num_heads // self.tp_size,
            num_kv_heads=max(1, spec.num_kv_heads // self.tp_size),
            intermediate_size=spec.intermediate_size // self.tp_size,
            vocab_size=end - first,
            moe=moe and replace(moe, intermediate_size=moe.intermediate_size // self.tp_size),
        )

    @property
    def vocab_range(self) -> Range:
        """The rank's tokens: first and end."""
        width = self.vocab_shard_size
        return self.rank * width, min((self.rank + 1) * width, self.spec.vocab_size)

    @property
    def vocab_shard_size(self) -> int:
        """Number of tokens of a rank; the last one may have fewer."""
        return _vocab_shard_size(self.spec, self.tp_size)

    def slice_of(self, name: str, shape: tuple[int, ...]) -> ShardSlice | None:
        """The rank's slice of a stored tensor of this shape, or None for the whole tensor."""
        if self.tp_size == 1:
            return None
        *path, kind = name.split(".")
        for piece in (kind, *reversed(path)):
            if piece in _COLUMN_PARALLEL or piece in _ROW_PARALLEL:
                break
        else:
            return None
        by_input = piece in _ROW_PARALLEL
        axis = _shard_axis(kind, by_input, len(shape))
        # a single scale, or that of the only group, is shared by all ranks
        if axis is None or axis >= len(shape) or shape[axis] == 1:
            return None
        part = _ROW_PARALLEL[piece] if by_input else _COLUMN_PARALLEL[piece]
        if piece == "ffn_up" and self.spec.fused_projections:
            part = "gate_up"
        return ShardSlice(axis, *self._part_ranges(part))

    def contributes(self, name: str) -> bool:
        """False for a bias that another rank adds: it follows a sum over the ranks."""
        *path, kind = name.split(".")
        return self.rank == 0 or kind != "bias" or path[-1] not in _ROW_PARALLEL

    def _part_ranges(self, part: _ShardedDim) -> tuple[tuple[Range, ...], int]:
        """ranges and num_parts of a ShardSlice."""
        rank, size, heads, kv = self.rank, self.tp_size, self.spec.num_heads, self.spec.num_kv_heads
        own = (rank * heads // size, (rank + 1) * heads // size)
        first = rank * kv // size  # several ranks share a head if there are fewer heads than ranks
        own_kv = (first, first + max(1, kv // size))
        match part:
            case "heads":
                return (own,), heads
            case "kv_heads":
                return (own_kv,), kv
            case "qkv":
                return (
                    own,
                    _offset_range(own_kv, heads),
                    _offset_range(own_kv, heads + kv),
                ), heads + 2 * kv
            case "mlp":
                return ((rank, rank + 1),), size
            case "gate_up":
                return ((rank, rank + 1), (size + rank, size + rank + 1)), 2 * size
            case "vocab":
                return (self.vocab_range,), self.spec.vocab_size


def ensure_divisible(spec: ModelSpec, tp_size: int) -> None:
    """Raise InvalidRequest, with the possible sizes, if the model cannot be divided by tp_size."""
    obstacle = _indivisible_part(spec, tp_size)
    if obstacle is None:
        return
    *others, most = [
        str(n) for n in range(1, spec.num_heads + 1) if _indivisible_part(spec, n) is None
    ]
    possible = f"{', '.join(others)} or {most}" if others else most
    raise InvalidRequest(
        f"--tp {tp_size}: {obstacle} cannot be divided by {tp_size}: use {possible}", param="tp"
    )


def _indivisible_part(spec: ModelSpec, tp_size: int) -> str | None:
    """The first part of the model that cannot be divided evenly, or None."""
    if tp_size == 1:
        return None
    inner = spec.intermediate_size if spec.moe is None else spec.moe.intermediate_size
    if spec.wide_qk_norm:
        return "a norm over all heads"
    if spec.num_heads % tp_size:
        return f"{spec.num_heads} heads"
    if spec.num_kv_heads % tp_size and tp_size % spec.num_kv_heads:
        return f"{spec.num_kv_heads} key-value heads"
    if inner % tp_size:
        return f"{'an MLP' if spec.moe is None else 'experts'} of width {inner:,}"
    if spec.vocab_size <= (tp_size - 1) * _vocab_shard_size(spec, tp_size):
        return f"a vocabulary of {spec.vocab_size:,}"
    return _indivisible_quantized_part(spec, tp_size)


def _indivisible_quantized_part(spec: ModelSpec, tp_size: int) -> str | None:
    """Packed words of eight values and groups of inputs cannot be split."""
    quant = spec.quant
    if quant is None:
        return None
    if spec.moe is not None:
        return "quantized experts"
    if quant.method in ("fp8", "int8"):
        return None
    if quant.dequantized_on_load:
        return f"quantized weights of {quant.bits} bits"
    group = quant.group_size
    if quant.desc_act and group is not None:
        return "GPTQ weights whose groups follow the order of activation (desc_act)"
    for what, width in (
        ("attention", spec.num_heads * spec.head_dim),
        ("an MLP", spec.intermediate_size),
    ):
        if width // tp_size % (group or 8):
            return f"{what} of width {width:,} in groups of {group or 8}"
    return f"heads of width {spec.head_dim}" if spec.head_dim % 8 else None


def _vocab_shard_size(spec: ModelSpec, tp_size: int) -> int:
    return -(-spec.vocab_size // (tp_size * _VOCAB_ALIGNMENT)) * _VOCAB_ALIGNMENT


def _shard_axis(kind: str, row_parallel: bool, num_dims: int) -> int | None:
    """The axis along which a stored tensor is split, or None. kind: last part of its name."""
    match kind:
        case "weight_shape":
            return None
        case "bias":
            return None if row_parallel else 0
        case "weight_scale" | "weight_scale_inv":  # [out, groups], or only one scale per output
            return (1 if num_dims == 2 else None) if row_parallel else 0
        case "g_idx":
            return 0 if row_parallel else None
        case "qweight" | "qzeros" | "scales":  # inputs first
            return 0 if row_parallel else 1
    return num_dims - 1 if row_parallel else num_dims - 2


def _offset_range(part: Range, offset: int) -> Range:
    return part[0] + offset, part[1] + offset
