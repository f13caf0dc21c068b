"""ModelSpec: the dimensions and variations of a decoder, independent of the file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.rope import QueryScaling, Rope

MAX_LAYERS = 10_000
# of all layers together: each has tensors of its own, whose names are listed
_MAX_EXPERTS = 200_000

Activation = Literal["silu", "gelu_tanh"]
QuantMethod = Literal["awq", "gptq", "pack-quantized", "fp8", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """method: awq (GEMM layout), gptq and pack-quantized (compressed-tensors) are integers with a
    scale per group of inputs; fp8 (e4m3) and int8 have a scale per row.

    group_size: inputs that share a scale and a zero point, or None for the whole row. zero_point:
    zero points are stored and may differ from the middle of the range. desc_act: groups follow
    g_idx instead of the order of inputs. zero_offset: added to a stored zero point, modulo 2 **
    bits.
    """

    method: QuantMethod
    bits: int
    group_size: int | None = None
    zero_point: bool = False
    desc_act: bool = False
    zero_offset: int = 0

    @property
    def dequantized_on_load(self) -> bool:
        """Weights are dequantized while loading, as no kernel computes with them."""
        return self.method == "int8" or (self.method != "fp8" and self.bits != 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of every MLP.

    intermediate_size: width of one expert. normalize_topk: the weights of the top_k experts are
    normalized to a sum of 1.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_topk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder of RMSNorm, attention with RoPE and gated MLP, with the variations between models.

    architecture: class name in Hugging Face. max_len: longest sequence, in tokens.
    norm_offset: norms multiply by 1 + weight.
    sandwich_norms: norms after attention and MLP too, named as in Gemma.
    qk_norm: RMSNorm over each head of q and k before RoPE; wide_qk_norm: over all heads together.
    rope: of layers with full attention. local_rope: of layers with a window, if it differs.
    layers_without_rope: indices of layers that do not rotate q and k.
    interleaved_rope: in the checkpoint, neighbours are rotated together instead of halves.
    sliding_windows: for each layer, number of positions up to its own that a token attends to,
    or None for all.
    embed_scale: exact; applied rounded to the dtype of the embeddings.
    query_scaling: by position, after RoPE.
    residual_scale: factor of the outputs of attention and MLP. logit_divisor: divides the logits.
    tied_embeddings: the head is the embedding.
    fused_projections: the checkpoint has one tensor for q, k and v, and one for gate and up.
    text_only: the checkpoint has other parts too, which are not loaded.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    norm_eps: float
    norm_offset: bool
    sandwich_norms: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: Activation
    rope: Rope
    local_rope: Rope | None
    sliding_windows: tuple[int | None, ...]
    attn_scale: float
    attn_softcap: float | None
    logit_softcap: float | None
    embed_scale: float
    tied_embeddings: bool
    fused_projections: bool
    moe: MoeConfig | None
    quant: QuantizationConfig | None
    layers_without_rope: frozenset[int] = frozenset()
    text_only: bool = False
    wide_qk_norm: bool = False
    query_scaling: QueryScaling | None = None
    interleaved_rope: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0

    def layer_rope(self, index: int) -> Rope | None:
        """RoPE of a layer, or None if it has none."""
        if index in self.layers_without_rope:
            return None
        if self.local_rope is None or self.sliding_windows[index] is None:
            return self.rope
        return self.local_rope

    @property
    def num_params(self) -> int:
        """Number of weights, without biases and norms."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.moe is not None:
            mlp = self.moe.num_experts * self.hidden_size * (3 * self.moe.intermediate_size + 1)
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size * (
            2 - self.tied_embeddings
        )


def check_head_counts(config: ConfigFields, spec: ModelSpec) -> None:
    """Raise LoadFailed if the attention heads cannot share the key-value heads evenly."""
    if spec.num_heads % spec.num_kv_heads:
        raise config.load_error(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads "
            "evenly"
        )


def check_num_experts(config: ConfigFields, spec: ModelSpec) -> None:
    """Raise LoadFailed if there are more experts than any model has."""
    if spec.moe is not None and spec.num_layers * spec.moe.num_experts > _MAX_EXPERTS:
        raise config.load_error(
            f"{spec.moe.num_experts:,} experts in each of {spec.num_layers:,} layers are too many, "
            f"at most {_MAX_EXPERTS:,} together"
        )
