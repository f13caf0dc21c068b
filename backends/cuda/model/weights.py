"""The weights of a decoder on their device, loaded from a checkpoint or random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.model.dummy import DummyWeightLoader
from localgen.backends.cuda.model.linear import DenseLinear, Linear, merge_linears, reorder_outputs
from localgen.backends.cuda.model.weight_loader import SafetensorsWeightLoader
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.checkpoint import SafetensorsCheckpoint
from localgen.backends.formats.hf.tensor_names import LayerNames, layer_names, qk_norm_sizes
from localgen.backends.units import format_size


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Expert weights of one layer.

    router: [experts, hidden].
    gate_up: [experts, 2 * intermediate, hidden].
    down: [experts, hidden, intermediate].
    """

    router: DenseLinear
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """Weights of one layer.

    input_norm, mlp_norm: [hidden], before attention and MLP, if the architecture has them.
    post_attention_norm, post_mlp_norm: [hidden], after them, likewise.
    qkv: outputs are all of q, then k, then v.
    q_norm, k_norm: if the spec has qk_norm, [head_dim], or of all heads with wide_qk_norm.
    gate_up: outputs are all of gate, then all of up.

    Either gate_up and down, or experts are set.
    """

    input_norm: Tensor | None
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear | None
    down: Linear | None
    experts: ExpertWeights | None
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """All weights of a model. embed: [vocab, hidden]. norm: [hidden]. head: hidden -> vocab."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Memory of all weights; a tied head counts once."""
        return sum({id(t): t.nbytes for t in _iter_tensors(self)}.values())


class WeightLoader(Protocol):
    """Source of weights. Names are those of Hugging Face, without `.weight`."""

    def norm(self, name: str, size: int) -> Tensor: ...

    def embedding(self, name: str, rows: int, size: int) -> Tensor: ...

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> Linear: ...

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Router, gate_up and down of a layer, with the shapes of ExpertWeights."""
        ...


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    shard: ModelShard | None = None,
) -> DecoderWeights:
    """Load the weights of a Hugging Face folder, tensor by tensor straight to the device.

    dtype: of all weights that are not quantized. shard: the part to load, or None for all.

    Raises LoadFailed if a file is missing or damaged, or if a tensor is missing, unexpected, or has
    the wrong shape or type. Raises OutOfMemory.
    """
    device = torch.device(device)
    shard = shard or ModelShard(spec)
    with SafetensorsCheckpoint(folder, device, shard) as checkpoint:
        tensors = SafetensorsWeightLoader(checkpoint, shard.local_spec, dtype)
        weights = build_weights(tensors, shard.local_spec, name=str(folder), device=device)
        tensors.check_all_read()
    return weights


def random_weights(
    spec: ModelSpec, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> DecoderWeights:
    """Random weights in the shapes and layouts of the spec, for benchmarks.

    Deterministic per seed and kind of device. Raises OutOfMemory.
    """
    device = torch.device(device)
    tensors = DummyWeightLoader(spec, device, dtype, seed)
    return build_weights(tensors, spec, name=spec.architecture, device=device)


def build_weights(
    loader: WeightLoader, spec: ModelSpec, *, name: str, device: torch.device
) -> DecoderWeights:
    """Build the weights of a model from a loader. name: the model's name in OutOfMemory."""
    try:
        return _build_decoder(loader, spec)
    except torch.OutOfMemoryError:
        raise OutOfMemory(_out_of_memory_message(name, device)) from None


def _build_decoder(loader: WeightLoader, spec: ModelSpec) -> DecoderWeights:
    embed = loader.embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    layers = [_layer(loader, spec, f"model.layers.{index}") for index in range(spec.num_layers)]
    norm = loader.norm("model.norm", spec.hidden_size)
    if spec.tied_embeddings:
        return DecoderWeights(embed=embed, layers=layers, norm=norm, head=DenseLinear(embed))
    head = loader.linear("lm_head", spec.hidden_size, spec.vocab_size)
    return DecoderWeights(embed=embed, layers=layers, norm=norm, head=head)


def _layer(loader: WeightLoader, spec: ModelSpec, layer: str) -> LayerWeights:
    def norm(name: str, size: int = spec.hidden_size) -> Tensor | None:
        return loader.norm(f"{layer}.{name}", size) if name else None

    names, dense = layer_names(spec), spec.moe is None
    queries = spec.num_heads * spec.head_dim
    q_norm, k_norm = ("self_attn.q_norm", "self_attn.k_norm") if spec.qk_norm else ("", "")
    q_size, k_size = qk_norm_sizes(spec)
    return LayerWeights(
        input_norm=norm(names.attention_norm),
        qkv=_qkv(loader, spec, layer, names),
        q_norm=norm(q_norm, q_size),
        k_norm=norm(k_norm, k_size),
        attention_out=loader.linear(
            f"{layer}.{names.out}", queries, spec.hidden_size, bias=spec.out_bias
        ),
        post_attention_norm=norm(names.post_attention_norm),
        mlp_norm=norm(names.mlp_norm),
        gate_up=_gate_up(loader, spec, layer, names) if dense else None,
        down=_down(loader, spec, layer, names) if dense else None,
        experts=None if dense else _experts(loader, layer),
        post_mlp_norm=norm(names.post_mlp_norm),
    )


def _qkv(loader: WeightLoader, spec: ModelSpec, layer: str, names: LayerNames) -> Linear:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = [queries + 2 * keys] if len(names.qkv) == 1 else [queries, keys, keys]
    parts = [
        loader.linear(f"{layer}.{name}", spec.hidden_size, size, bias=spec.qkv_bias)
        for name, size in zip(names.qkv, sizes, strict=True)
    ]
    if spec.interleaved_rope:
        assert len(parts) == 3
        for index, heads in enumerate((spec.num_heads, spec.num_kv_heads)):
            parts[index] = reorder_outputs(parts[index], _halves_order(spec, heads))
    return merge_linears(parts)


def _halves_order(spec: ModelSpec, heads: int) -> Tensor:
    """Order of the outputs of heads, stored in pairs of neighbours, that puts pairs in halves."""
    pairs = torch.arange(spec.rope.dim).view(-1, 2)
    order = torch.cat([pairs.T.flatten(), torch.arange(spec.rope.dim, spec.head_dim)])
    return (torch.arange(heads)[:, None] * spec.head_dim + order).flatten()


def _gate_up(loader: WeightLoader, spec: ModelSpec, layer: str, names: LayerNames) -> Linear:
    size = 2 * spec.intermediate_size // len(names.gate_up)
    return merge_linears(
        [
            loader.linear(f"{layer}.{name}", spec.hidden_size, size, bias=spec.mlp_bias)
            for name in names.gate_up
        ]
    )


def _down(loader: WeightLoader, spec: ModelSpec, layer: str, names: LayerNames) -> Linear:
    return loader.linear(
        f"{layer}.{names.down}", spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias
    )


def _experts(loader: WeightLoader, layer: str) -> ExpertWeights:
    router, gate_up, down = loader.experts(layer)
    return ExpertWeights(DenseLinear(router), gate_up, down)


def _out_of_memory_message(model_name: str, device: torch.device) -> str:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return (
        f"the weights of {model_name} do not fit on {device}: {format_size(free_bytes)} of "
        f"{format_size(total_bytes)} are free; use a smaller or a quantized model"
    )


def _iter_tensors(part: object) -> Iterator[Tensor]:
    """All tensors in nested dataclasses, lists and tuples."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _iter_tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _iter_tensors(getattr(part, field.name))
