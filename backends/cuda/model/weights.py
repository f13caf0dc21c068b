"""The weights of a decoder on their device, from a checkpoint or made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.model.dummy import MadeUpTensors
from localgen.backends.cuda.model.linear import DenseLinear, Linear, join
from localgen.backends.cuda.model.weight_loader import StoredTensors
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.formats.hf.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """router: [experts, hidden]. gate_up: [experts, 2 * intermediate, hidden].

    down: [experts, hidden, intermediate].
    """

    router: DenseLinear
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer. qkv: outputs are all of q, then k, then v; gate_up: all of gate, then up.

    q_norm, k_norm: [head_dim], with qk_norm. post_attention_norm, post_mlp_norm: [hidden], with
    sandwich_norms. mlp_norm: the one before the MLP. gate_up and down, or experts.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear | None
    down: Linear | None
    experts: Experts | None
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Weights:
    """embed: [vocab, hidden]. norm: [hidden]. head: hidden -> vocab."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Memory of all of them; a tied head counts once."""
        return sum({id(t): t.nbytes for t in _tensors(self)}.values())


class Tensors(Protocol):
    """Where weights come from; names are those of Hugging Face, without `.weight`."""

    def norm(self, name: str, size: int) -> Tensor: ...

    def embedding(self, name: str, rows: int, size: int) -> Tensor: ...

    def linear(self, name: str, ins: int, outs: int, *, bias: bool = False) -> Linear: ...

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Router, gate_up and down of a layer, shaped as in Experts."""
        ...


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    shard: Shard | None = None,
) -> Weights:
    """The weights of a Hugging Face folder, tensor by tensor straight to the device.

    dtype: of all that is not quantized. shard: what to read; None: all. LoadFailed: a file is
    missing or damaged, or a tensor is missing, of the wrong shape or type, or not part of such a
    model. OutOfMemory.
    """
    device = torch.device(device)
    shard = shard or Shard(spec)
    with Checkpoint(folder, device, shard) as checkpoint:
        tensors = StoredTensors(checkpoint, shard.local, dtype)
        weights = build_weights(tensors, shard.local, name=str(folder), device=device)
        tensors.check_all_read()
    return weights


def random_weights(
    spec: ModelSpec, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> Weights:
    """Weights of the real shapes and layouts without a checkpoint, for benchmarks.

    Equal for equal seeds on one kind of device. OutOfMemory.
    """
    device = torch.device(device)
    tensors = MadeUpTensors(spec, device, dtype, seed)
    return build_weights(tensors, spec, name=spec.architecture, device=device)


def build_weights(tensors: Tensors, spec: ModelSpec, *, name: str, device: torch.device) -> Weights:
    """The weights of a model from wherever they come. name: what to call it in OutOfMemory."""
    try:
        return _build(tensors, spec)
    except torch.OutOfMemoryError:
        raise OutOfMemory(_shortage(name, device)) from None


def _build(tensors: Tensors, spec: ModelSpec) -> Weights:
    embed = tensors.embedding("model.embed_tokens", spec.vocab, spec.hidden)
    layers = [_layer(tensors, spec, f"model.layers.{index}") for index in range(spec.layers)]
    norm = tensors.norm("model.norm", spec.hidden)
    if spec.tied:
        return Weights(embed=embed, layers=layers, norm=norm, head=DenseLinear(embed))
    head = tensors.linear("lm_head", spec.hidden, spec.vocab)
    return Weights(embed=embed, layers=layers, norm=norm, head=head)


def _layer(tensors: Tensors, spec: ModelSpec, layer: str) -> LayerWeights:
    def norm(name: str, wanted: bool = True, size: int = spec.hidden) -> Tensor | None:
        return tensors.norm(f"{layer}.{name}", size) if wanted else None

    sandwich, attention = spec.sandwich_norms, f"{layer}.self_attn"
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    dense = spec.moe is None
    return LayerWeights(
        input_norm=tensors.norm(f"{layer}.input_layernorm", spec.hidden),
        qkv=_qkv(tensors, spec, attention),
        q_norm=norm("self_attn.q_norm", spec.qk_norm, spec.head_dim),
        k_norm=norm("self_attn.k_norm", spec.qk_norm, spec.head_dim),
        out=tensors.linear(
            f"{attention}.o_proj", spec.heads * spec.head_dim, spec.hidden, bias=spec.out_bias
        ),
        post_attention_norm=norm("post_attention_layernorm", sandwich),
        mlp_norm=tensors.norm(f"{layer}.{mlp_norm}", spec.hidden),
        gate_up=_gate_up(tensors, spec, f"{layer}.mlp") if dense else None,
        down=_down(tensors, spec, f"{layer}.mlp") if dense else None,
        experts=None if dense else _experts(tensors, layer),
        post_mlp_norm=norm("post_feedforward_layernorm", sandwich),
    )


def _qkv(tensors: Tensors, spec: ModelSpec, attention: str) -> Linear:
    sizes = {"q": spec.heads * spec.head_dim}
    sizes["k"] = sizes["v"] = spec.kv_heads * spec.head_dim
    if spec.fused:
        name = f"{attention}.qkv_proj"
        return tensors.linear(name, spec.hidden, sum(sizes.values()), bias=spec.qkv_bias)
    return join(
        [
            tensors.linear(f"{attention}.{part}_proj", spec.hidden, size, bias=spec.qkv_bias)
            for part, size in sizes.items()
        ]
    )


def _gate_up(tensors: Tensors, spec: ModelSpec, mlp: str) -> Linear:
    if spec.fused:
        return tensors.linear(f"{mlp}.gate_up_proj", spec.hidden, 2 * spec.intermediate)
    return join(
        [
            tensors.linear(f"{mlp}.{part}_proj", spec.hidden, spec.intermediate, bias=spec.mlp_bias)
            for part in ("gate", "up")
        ]
    )


def _down(tensors: Tensors, spec: ModelSpec, mlp: str) -> Linear:
    return tensors.linear(f"{mlp}.down_proj", spec.intermediate, spec.hidden, bias=spec.mlp_bias)


def _experts(tensors: Tensors, layer: str) -> Experts:
    router, gate_up, down = tensors.experts(layer)
    return Experts(DenseLinear(router), gate_up, down)


def _shortage(model: str, device: torch.device) -> str:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return (
        f"the weights of {model} do not fit on {device}: {free_bytes / 1e9:.1f} GB of "
        f"{total_bytes / 1e9:.1f} GB are left; use a smaller or a quantized model"
    )


def _tensors(part: object) -> Iterator[Tensor]:
    """All tensors in a value made of dataclasses, lists and tuples."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
