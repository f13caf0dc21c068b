"""The tensors of a model by their Hugging Face names, and their shapes."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_spec import ModelSpec

TensorShape = tuple[int, ...]


def expected_shapes(spec: ModelSpec) -> dict[str, TensorShape]:
    """Every tensor that the model must have."""
    shapes: dict[str, TensorShape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    layer = layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, TensorShape]:
    """The tensors of one layer, by their names within it."""
    shapes: dict[str, TensorShape] = {f"{name}.weight": size for name, size in _norms(spec).items()}
    for linears, biased in (
        (_attention_inputs(spec), spec.qkv_bias),
        ({"self_attn.o_proj": (spec.hidden_size, spec.num_heads * spec.head_dim)}, spec.out_bias),
        (_mlp(spec) if spec.moe is None else _experts(spec), spec.mlp_bias),
    ):
        for name, shape in linears.items():
            shapes[f"{name}.weight"] = shape
            if biased:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _norms(spec: ModelSpec) -> dict[str, TensorShape]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms: dict[str, TensorShape] = dict.fromkeys(names, (spec.hidden_size,))
    if spec.qk_norm:
        norms |= dict.fromkeys(["self_attn.q_norm", "self_attn.k_norm"], (spec.head_dim,))
    return norms


def _attention_inputs(spec: ModelSpec) -> dict[str, TensorShape]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.fused_projections:
        return {"self_attn.qkv_proj": (queries + 2 * keys, spec.hidden_size)}
    rows = {"q": queries, "k": keys, "v": keys}
    return {f"self_attn.{part}_proj": (outs, spec.hidden_size) for part, outs in rows.items()}


def _mlp(spec: ModelSpec) -> dict[str, TensorShape]:
    wide = (spec.intermediate_size, spec.hidden_size)
    down = {"mlp.down_proj": (spec.hidden_size, spec.intermediate_size)}
    if spec.fused_projections:
        return {"mlp.gate_up_proj": (2 * spec.intermediate_size, spec.hidden_size), **down}
    return {"mlp.gate_proj": wide, "mlp.up_proj": wide, **down}


def _experts(spec: ModelSpec) -> dict[str, TensorShape]:
    assert spec.moe is not None
    mixtral = spec.architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    wide = (spec.moe.intermediate_size, spec.hidden_size)
    shapes: dict[str, TensorShape] = {f"{block}.gate": (spec.moe.num_experts, spec.hidden_size)}
    for expert in range(spec.moe.num_experts):
        own = f"{block}.experts.{expert}"
        shapes |= {f"{own}.{gate}": wide, f"{own}.{up}": wide, f"{own}.{down}": wide[::-1]}
    return shapes
