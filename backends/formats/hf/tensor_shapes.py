"""The tensors of a model by their Hugging Face names, and their shapes."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_spec import ModelSpec

Shape = tuple[int, ...]


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that the model must have."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    layer = layer_shapes(spec)
    for index in range(spec.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The tensors of one layer, by their names within it."""
    shapes: dict[str, Shape] = {f"{name}.weight": size for name, size in _norms(spec).items()}
    for linears, biased in (
        (_inputs_of_attention(spec), spec.qkv_bias),
        ({"self_attn.o_proj": (spec.hidden, spec.heads * spec.head_dim)}, spec.out_bias),
        (_mlp(spec) if spec.moe is None else _experts(spec), spec.mlp_bias),
    ):
        for name, shape in linears.items():
            shapes[f"{name}.weight"] = shape
            if biased:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _norms(spec: ModelSpec) -> dict[str, Shape]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms: dict[str, Shape] = dict.fromkeys(names, (spec.hidden,))
    if spec.qk_norm:
        norms |= dict.fromkeys(["self_attn.q_norm", "self_attn.k_norm"], (spec.head_dim,))
    return norms


def _inputs_of_attention(spec: ModelSpec) -> dict[str, Shape]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if spec.fused:
        return {"self_attn.qkv_proj": (queries + 2 * keys, spec.hidden)}
    rows = {"q": queries, "k": keys, "v": keys}
    return {f"self_attn.{part}_proj": (outs, spec.hidden) for part, outs in rows.items()}


def _mlp(spec: ModelSpec) -> dict[str, Shape]:
    wide = (spec.intermediate, spec.hidden)
    down = {"mlp.down_proj": (spec.hidden, spec.intermediate)}
    if spec.fused:
        return {"mlp.gate_up_proj": (2 * spec.intermediate, spec.hidden), **down}
    return {"mlp.gate_proj": wide, "mlp.up_proj": wide, **down}


def _experts(spec: ModelSpec) -> dict[str, Shape]:
    assert spec.moe is not None
    mixtral = spec.architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    wide = (spec.moe.intermediate, spec.hidden)
    shapes: dict[str, Shape] = {f"{block}.gate": (spec.moe.experts, spec.hidden)}
    for expert in range(spec.moe.experts):
        own = f"{block}.experts.{expert}"
        shapes |= {f"{own}.{gate}": wide, f"{own}.{up}": wide, f"{own}.{down}": wide[::-1]}
    return shapes
