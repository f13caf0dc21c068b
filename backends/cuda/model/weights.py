"""The weights of a decoder on their device, from a checkpoint or made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.model.dummy import DummyWeightLoader
from localgen.backends.cuda.model.linear import DenseLinear, Linear, merge_linears
from localgen.backends.cuda.model.weight_loader import SafetensorsWeightLoader
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.checkpoint import SafetensorsCheckpoint


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
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
    attention_out: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear | None
    down: Linear | None
    experts: ExpertWeights | None
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """embed: [vocab, hidden]. norm: [hidden]. head: hidden -> vocab."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Memory of all of them; a tied head counts once."""
        return sum({id(t): t.nbytes for t in _iter_tensors(self)}.values())


class WeightLoader(Protocol):
    """Where weights come from; names are those of Hugging Face, without `.weight`."""

    def norm(self, name: str, size: int) -> Tensor: ...

    def embedding(self, name: str, rows: int, size: int) -> Tensor: ...

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> Linear: ...

    def experts(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Router, gate_up and down of a layer, shaped as in ExpertWeights."""
        ...


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    shard: ModelShard | None = None,
) -> DecoderWeights:
    """The weights of a Hugging Face folder, tensor by tensor straight to the device.

    dtype: of all that is not quantized. shard: what to read; None: all. LoadFailed: a file is
    missing or damaged, or a tensor is missing, of the wrong shape or type, or not part of such a
    model. OutOfMemory.
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
    """Weights of the real shapes and layouts without a checkpoint, for benchmarks.

    Equal for equal seeds on one kind of device. OutOfMemory.
    """
    device = torch.device(device)
    tensors = DummyWeightLoader(spec, device, dtype, seed)
    return build_weights(tensors, spec, name=spec.architecture, device=device)


def build_weights(
    loader: WeightLoader, spec: ModelSpec, *, name: str, device: torch.device
) -> DecoderWeights:
    """The weights of a model from wherever they come. name: what to call it in OutOfMemory."""
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
    def norm(name: str, wanted: bool = True, size: int = spec.hidden_size) -> Tensor | None:
        return loader.norm(f"{layer}.{name}", size) if wanted else None

    sandwich, attention = spec.sandwich_norms, f"{layer}.self_attn"
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    dense = spec.moe is None
    return LayerWeights(
        input_norm=loader.norm(f"{layer}.input_layernorm", spec.hidden_size),
        qkv=_qkv(loader, spec, attention),
        q_norm=norm("self_attn.q_norm", spec.qk_norm, spec.head_dim),
        k_norm=norm("self_attn.k_norm", spec.qk_norm, spec.head_dim),
        attention_out=loader.linear(
            f"{attention}.o_proj",
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.out_bias,
        ),
        post_attention_norm=norm("post_attention_layernorm", sandwich),
        mlp_norm=loader.norm(f"{layer}.{mlp_norm}", spec.hidden_size),
        gate_up=_gate_up(loader, spec, f"{layer}.mlp") if dense else None,
        down=_down(loader, spec, f"{layer}.mlp") if dense else None,
        experts=None if dense else _experts(loader, layer),
        post_mlp_norm=norm("post_feedforward_layernorm", sandwich),
    )


def _qkv(loader: WeightLoader, spec: ModelSpec, attention: str) -> Linear:
    sizes = {"q": spec.num_heads * spec.head_dim}
    sizes["k"] = sizes["v"] = spec.num_kv_heads * spec.head_dim
    if spec.fused_projections:
        name = f"{attention}.qkv_proj"
        return loader.linear(name, spec.hidden_size, sum(sizes.values()), bias=spec.qkv_bias)
    return merge_linears(
        [
            loader.linear(f"{attention}.{part}_proj", spec.hidden_size, size, bias=spec.qkv_bias)
            for part, size in sizes.items()
        ]
    )


def _gate_up(loader: WeightLoader, spec: ModelSpec, mlp: str) -> Linear:
    if spec.fused_projections:
        return loader.linear(f"{mlp}.gate_up_proj", spec.hidden_size, 2 * spec.intermediate_size)
    return merge_linears(
        [
            loader.linear(
                f"{mlp}.{part}_proj", spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias
            )
            for part in ("gate", "up")
        ]
    )


def _down(loader: WeightLoader, spec: ModelSpec, mlp: str) -> Linear:
    return loader.linear(
        f"{mlp}.down_proj", spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias
    )


def _experts(loader: WeightLoader, layer: str) -> ExpertWeights:
    router, gate_up, down = loader.experts(layer)
    return ExpertWeights(DenseLinear(router), gate_up, down)


def _out_of_memory_message(model_name: str, device: torch.device) -> str:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return (
        f"the weights of {model_name} do not fit on {device}: {free_bytes / 1e9:.1f} GB of "
        f"{total_bytes / 1e9:.1f} GB are left; use a smaller or a quantized model"
    )


def _iter_tensors(part: object) -> Iterator[Tensor]:
    """All tensors in a value made of dataclasses, lists and tuples."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _iter_tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _iter_tensors(getattr(part, field.name))
