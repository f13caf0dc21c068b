"""Names and shapes of a checkpoint's tensors in Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.formats.architecture.model_spec import ModelSpec

# the converter to GGUF runs without torch
if TYPE_CHECKING:
    from torch import Tensor

LayerTensors = dict[str, "Tensor"]
TensorShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Names of a layer's linears and norms, without `.weight`. Empty: it has no such norm.

    attention_norm, mlp_norm: before attention and MLP; post_attention_norm, post_mlp_norm: after
    them. qkv: q, k and v, or one name if they are fused. gate_up: likewise. With experts, gate_up
    and down have `{}` in place of the expert's index.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_mlp_norm: str = ""
    router: str | None = None


_SANDWICH = LayerNames(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
_POST_NORMS = LayerNames(
    attention_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)
_NAMES_BY_ARCHITECTURE = {
    "Phi3ForCausalLM": LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "MixtralForCausalLM": LayerNames(
        gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        down="block_sparse_moe.experts.{}.w2",
        router="block_sparse_moe.gate",
    ),
    "Qwen3MoeForCausalLM": LayerNames(
        gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        down="mlp.experts.{}.down_proj",
        router="mlp.gate",
    ),
    "Olmo2ForCausalLM": _POST_NORMS,
    "Olmo3ForCausalLM": _POST_NORMS,
    "Exaone4ForCausalLM": _POST_NORMS,
    "Glm4ForCausalLM": LayerNames(
        post_attention_norm="post_self_attn_layernorm",
        gate_up=("mlp.gate_up_proj",),
        post_mlp_norm="post_mlp_layernorm",
    ),
}


def layer_names(spec: ModelSpec) -> LayerNames:
    default = _SANDWICH if spec.sandwich_norms else LayerNames()
    return _NAMES_BY_ARCHITECTURE.get(spec.architecture, default)


def qk_norm_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Sizes of the norms of q and k."""
    if spec.wide_qk_norm:
        return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.head_dim, spec.head_dim


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear of a layer that is quantized, by name; not the router."""
    names = layer_names(spec)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    outs = [queries + 2 * keys] if len(names.qkv) == 1 else [queries, keys, keys]
    shapes = {name: (out, spec.hidden_size) for name, out in zip(names.qkv, outs, strict=True)}
    shapes[names.out] = (spec.hidden_size, queries)
    width = spec.intermediate_size if spec.moe is None else spec.moe.intermediate_size
    for expert in range(1 if spec.moe is None else spec.moe.num_experts):
        for name in names.gate_up:
            shapes[name.format(expert)] = (2 * width // len(names.gate_up), spec.hidden_size)
        shapes[names.down.format(expert)] = (spec.hidden_size, width)
    return shapes


def expected_shapes(spec: ModelSpec) -> dict[str, TensorShape]:
    """Shape of every tensor that the model must have, by name."""
    shapes: dict[str, TensorShape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    layer = _layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, TensorShape]:
    names = layer_names(spec)
    norms = (
        names.attention_norm,
        names.post_attention_norm,
        names.mlp_norm,
        names.post_mlp_norm,
    )
    shapes: dict[str, TensorShape] = {
        f"{norm}.weight": (spec.hidden_size,) for norm in norms if norm
    }
    if spec.qk_norm:
        q_size, k_size = qk_norm_sizes(spec)
        shapes["self_attn.q_norm.weight"] = (q_size,)
        shapes["self_attn.k_norm.weight"] = (k_size,)
    for name, shape in linear_shapes(spec).items():
        shapes[f"{name}.weight"] = shape
        if name in names.qkv:
            biased = spec.qkv_bias
        else:
            biased = spec.out_bias if name == names.out else spec.mlp_bias
        if biased:
            shapes[f"{name}.bias"] = shape[:1]
        if name == names.out and spec.moe is not None:
            shapes[f"{names.router}.weight"] = (spec.moe.num_experts, spec.hidden_size)
    return shapes


def split_fused_experts(spec: ModelSpec, tensors: LayerTensors) -> LayerTensors:
    """Return a layer's tensors with every linear of every expert named as in LayerNames.

    transformers 5 can keep all experts of a layer in two tensors, `mlp.experts.gate_up_proj`
    [experts, 2 * intermediate, hidden] and `mlp.experts.down_proj`; these are split.
    """
    names = layer_names(spec)
    fused = "mlp.experts.gate_up_proj"
    if names.router is None or fused not in tensors:
        return tensors
    found = dict(tensors)
    found[f"{names.router}.weight"] = found.pop("mlp.gate.weight")
    gates_ups, downs = found.pop(fused), found.pop("mlp.experts.down_proj")
    for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
        for name, part in zip(names.gate_up, gate_up.chunk(2), strict=True):
            found[f"{name.format(expert)}.weight"] = part
        found[f"{names.down.format(expert)}.weight"] = down
    return found
