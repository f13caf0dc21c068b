"""What the tensors of a decoder layer are called, and the shapes of its linears."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec

LayerTensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """The linears of a layer by what they do, and the norms before them; without `.weight`.

    qkv: q, k and v, or one for all of them. gate_up: likewise. In a mixture of experts gate_up
    and down have the expert's number in place of `{}`, and router chooses among them.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str | None = None


_GEMMA = LayerNames(mlp_norm="pre_feedforward_layernorm")
_NAMES_BY_ARCHITECTURE = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
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
}


def layer_names(spec: ModelSpec) -> LayerNames:
    """What a layer of this architecture calls its tensors."""
    return _NAMES_BY_ARCHITECTURE.get(spec.architecture, LayerNames())


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear of a layer that is quantized, by its name."""
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


def split_fused_experts(spec: ModelSpec, tensors: LayerTensors) -> LayerTensors:
    """A layer whose experts are named as in LayerNames, one tensor for each linear of each.

    transformers 5 can keep all experts of a layer in two tensors, `mlp.experts.gate_up_proj`
    [experts, 2 * intermediate, hidden] and `mlp.experts.down_proj`; these are taken apart.
    """
    names = layer_names(spec)
    joint = "mlp.experts.gate_up_proj"
    if names.router is None or joint not in tensors:
        return tensors
    found = dict(tensors)
    found[f"{names.router}.weight"] = found.pop("mlp.gate.weight")
    gates_ups, downs = found.pop(joint), found.pop("mlp.experts.down_proj")
    for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
        for name, part in zip(names.gate_up, gate_up.chunk(2), strict=True):
            found[f"{name.format(expert)}.weight"] = part
        found[f"{names.down.format(expert)}.weight"] = down
    return found
