"""How a model is divided among ranks: what each keeps of every tensor.

Projections into heads and into the MLP are cut by outputs, those back by inputs, so that each
layer takes two sums over the ranks (Shoeybi et al. 2019). Embedding and head are cut by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_spec import ModelSpec

Range = tuple[int, int]
_Part = Literal["heads", "kv_heads", "qkv", "mlp", "gate_up", "vocab"]

# what the outputs of a linear are, by its name in safetensors and in GGUF files
_OUTPUTS: dict[str, _Part] = {
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
# what the inputs are of a linear whose outputs are summed over the ranks
_INPUTS: dict[str, _Part] = {
    "o_proj": "heads",
    "attn_output": "heads",
    "down_proj": "mlp",
    "w2": "mlp",
    "ffn_down": "mlp",
    "ffn_down_exps": "mlp",
}
# tokens of a rank are a multiple of this: digits of four bits lie eight to a word
_VOCAB_STEP = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a tensor: along `axis`, of `of` equal parts those in `ranges`."""

    axis: int
    ranges: tuple[Range, ...]
    of: int

    def share(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept."""
        return self._resized(whole, self._kept, self.of)

    def whole(self, share: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of which that is kept."""
        return self._resized(share, self.of, self._kept)

    def slices(self, length: int) -> list[slice]:
        """Where the ranges lie on the axis. length: of the whole axis."""
        return [
            slice(first * length // self.of, end * length // self.of) for first, end in self.ranges
        ]

    def taken(self, source: Any) -> Tensor:
        """What is kept of a tensor, or of a slice of a safetensors file, as a copy."""
        before = (slice(None),) * self.axis
        length = (source.shape if isinstance(source, Tensor) else source.get_shape())[self.axis]
        parts = [source[(*before, kept)] for kept in self.slices(length)]
        return torch.cat(parts, self.axis)

    @property
    def _kept(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def _resized(self, shape: tuple[int, ...], by: int, over: int) -> tuple[int, ...]:
        return (*shape[: self.axis], shape[self.axis] * by // over, *shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` has of a model. spec: of the whole model, which can be divided
    so (see check). Rank 0 of 1 has all of it."""

    spec: ModelSpec
    rank: int = 0
    size: int = 1

    @property
    def local(self) -> ModelSpec:
        """The model as this rank computes it."""
        if self.size == 1:
            return self.spec
        spec, moe = self.spec, self.spec.moe
        first, end = self.vocab
        return replace(
            spec,
            heads=spec.heads // self.size,
            kv_heads=max(1, spec.kv_heads // self.size),
            intermediate=spec.intermediate // self.size,
            vocab=end - first,
            moe=moe and replace(moe, intermediate=moe.intermediate // self.size),
        )

    @property
    def vocab(self) -> Range:
        """Its tokens, first and end."""
        width = self.vocab_width
        return self.rank * width, min((self.rank + 1) * width, self.spec.vocab)

    @property
    def vocab_width(self) -> int:
        """Tokens of every rank but the last, which may have fewer."""
        return _vocab_width(self.spec, self.size)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """What it keeps of a stored tensor; None: all of it. shape: of the whole tensor."""
        if self.size == 1:
            return None
        *path, kind = name.split(".")
        for piece in (kind, *reversed(path)):
            if piece in _OUTPUTS or piece in _INPUTS:
                break
        else:
            return None
        by_input = piece in _INPUTS
        axis = _axis(kind, by_input, len(shape))
        # a scale for all, or that of the only group, is everybody's
        if axis is None or axis >= len(shape) or shape[axis] == 1:
            return None
        part = _INPUTS[piece] if by_input else _OUTPUTS[piece]
        if piece == "ffn_up" and self.spec.fused:
            part = "gate_up"
        return Cut(axis, *self._ranges(part))

    def counts(self, name: str) -> bool:
        """Whether its copy of a tensor counts: a bias behind a sum over the ranks is added once."""
        *path, kind = name.split(".")
        return self.rank == 0 or kind != "bias" or path[-1] not in _INPUTS

    def _ranges(self, part: _Part) -> tuple[tuple[Range, ...], int]:
        """The ranges of a Cut, and of how many parts."""
        rank, size, heads, kv = self.rank, self.size, self.spec.heads, self.spec.kv_heads
        own = (rank * heads // size, (rank + 1) * heads // size)
        first = rank * kv // size  # which several ranks share where there are fewer than ranks
        own_kv = (first, first + max(1, kv // size))
        match part:
            case "heads":
                return (own,), heads
            case "kv_heads":
                return (own_kv,), kv
            case "qkv":
                return (own, _moved(own_kv, heads), _moved(own_kv, heads + kv)), heads + 2 * kv
            case "mlp":
                return ((rank, rank + 1),), size
            case "gate_up":
                return ((rank, rank + 1), (size + rank, size + rank + 1)), 2 * size
            case "vocab":
                return (self.vocab,), self.spec.vocab


def check(spec: ModelSpec, size: int) -> None:
    """InvalidRequest: a model cannot be divided so; says how it can."""
    obstacle = _obstacle(spec, size)
    if obstacle is None:
        return
    *others, most = [str(n) for n in range(1, spec.heads + 1) if _obstacle(spec, n) is None]
    possible = f"{', '.join(others)} or {most}" if others else most
    raise InvalidRequest(
        f"--tp {size}: {obstacle} cannot be divided by {size}: use {possible}", param="tp"
    )


def _obstacle(spec: ModelSpec, size: int) -> str | None:
    """What cannot be divided evenly."""
    if size == 1:
        return None
    inner = spec.intermediate if spec.moe is None else spec.moe.intermediate
    if spec.heads % size:
        return f"{spec.heads} heads"
    if spec.kv_heads % size and size % spec.kv_heads:
        return f"{spec.kv_heads} key-value heads"
    if inner % size:
        return f"{'an MLP' if spec.moe is None else 'experts'} of width {inner:,}"
    if spec.vocab <= (size - 1) * _vocab_width(spec, size):
        return f"a vocabulary of {spec.vocab:,}"
    return _quant_obstacle(spec, size)


def _quant_obstacle(spec: ModelSpec, size: int) -> str | None:
    """Words of eight digits and groups of inputs stay whole."""
    quant = spec.quant
    if quant is None:
        return None
    if spec.moe is not None:
        return "quantized experts"
    if quant.method in ("fp8", "int8"):
        return None
    if quant.widened:
        return f"GPTQ weights of {quant.bits} bits"
    group = quant.group_size
    if quant.desc_act and group is not None:
        return "GPTQ weights whose groups follow the order of activation (desc_act)"
    for what, width in (
        ("attention", spec.heads * spec.head_dim),
        ("an MLP", spec.intermediate),
    ):
        if width // size % (group or 8):
            return f"{what} of width {width:,} in groups of {group or 8}"
    return f"heads of width {spec.head_dim}" if spec.head_dim % 8 else None


def _vocab_width(spec: ModelSpec, size: int) -> int:
    return -(-spec.vocab // (size * _VOCAB_STEP)) * _VOCAB_STEP


def _axis(kind: str, by_input: bool, dims: int) -> int | None:
    """The axis of a stored tensor along which a linear is cut. kind: the end of its name."""
    match kind:
        case "bias" | "weight_scale":
            return None if by_input else 0
        case "g_idx":
            return 0 if by_input else None
        case "qweight" | "qzeros" | "scales":  # inputs first
            return 0 if by_input else 1
    return dims - 1 if by_input else dims - 2


def _moved(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by
