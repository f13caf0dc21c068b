"""Shapes of models: Llama in several formats, a Qwen 3 MoE, and small ones for checks and CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.formats.architecture.model_spec import (
    ModelSpec,
    MoeConfig,
    QuantizationConfig,
)
from localgen.backends.formats.architecture.rope import Llama3Scaling, Rope

INT4 = QuantizationConfig(method="awq", bits=4, group_size=128, zero_point=True)
FP8 = QuantizationConfig(method="fp8", bits=8)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to measure, with random weights. int8_cache: its KV cache has 8 bits."""

    name: str
    spec: ModelSpec
    int8_cache: bool = False

    @property
    def weight_bytes(self) -> int:
        """Approximate bytes of the weights, without scales; embeddings have 16 bits."""
        spec, bits = self.spec, self.spec.quant.bits if self.spec.quant else 16
        ends = spec.vocab_size * spec.hidden_size * (2 - spec.tied_embeddings)
        return 2 * ends + (spec.num_params - ends) * bits // 8


def llama(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int = 128_256,
    max_len: int = 131_072,
    stretch: float = 8.0,
    tied: bool = False,
    quant: QuantizationConfig | None = None,
) -> ModelSpec:
    """Return the spec of a Llama 3. stretch: factor of the RoPE scaling."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_len=max_len,
        norm_eps=1e-5,
        norm_offset=False,
        sandwich_norms=False,
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        activation="silu",
        rope=Rope(
            theta=500_000.0,
            dim=head_dim,
            scaling=Llama3Scaling(
                factor=stretch, low_freq_factor=1.0, high_freq_factor=4.0, trained_len=8192
            ),
        ),
        local_rope=None,
        sliding_windows=(None,) * layers,
        attn_scale=head_dim**-0.5,
        attn_softcap=None,
        logit_softcap=None,
        embed_scale=1.0,
        tied_embeddings=tied,
        fused_projections=False,
        moe=None,
        quant=quant,
    )


def config_of(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return config.json as transformers writes it. dtype: for example bfloat16."""
    scaling = spec.rope.scaling
    assert isinstance(scaling, Llama3Scaling)
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": spec.rope.theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.trained_len,
        },
        "tie_word_embeddings": spec.tied_embeddings,
        "dtype": dtype,
    }


_8B = llama(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128)
_70B = llama(layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128)
_1B = llama(
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    stretch=32.0,
    tied=True,
)
_3B = llama(
    layers=28,
    hidden=3072,
    intermediate=8192,
    heads=24,
    kv_heads=8,
    head_dim=128,
    stretch=32.0,
    tied=True,
)
_TINY = llama(
    layers=2,
    hidden=128,
    intermediate=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    max_len=4096,
)
_TINY_MIXTURE = replace(
    _TINY,
    qk_norm=True,
    moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=64, normalize_topk=True),
)
# Qwen3-30B-A3B
_30B_A3B = replace(
    llama(
        layers=48,
        hidden=2048,
        intermediate=6144,  # of a dense layer, which it does not have
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151_936,
        max_len=40_960,
    ),
    architecture="Qwen3MoeForCausalLM",
    norm_eps=1e-6,
    qk_norm=True,
    rope=Rope(theta=1_000_000.0, dim=128),
    moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768, normalize_topk=True),
)

PLAIN_8B = Shape("8B bf16", _8B)
INT4_8B = Shape("8B int4-g128", replace(_8B, quant=INT4))
FP8_8B = Shape("8B fp8", replace(_8B, quant=FP8))
PLAIN_3B = Shape("3B bf16", _3B)
INT4_3B = Shape("3B int4-g128", replace(_3B, quant=INT4))
FP8_3B = Shape("3B fp8", replace(_3B, quant=FP8))
PLAIN_1B = Shape("1B bf16", _1B)
INT4_1B = Shape("1B int4-g128", replace(_1B, quant=INT4))
FP8_1B = Shape("1B fp8", replace(_1B, quant=FP8))
INT4_70B = Shape("70B int4-g128", replace(_70B, quant=INT4))
PLAIN_TINY = Shape("tiny bf16", _TINY)
INT4_TINY = Shape("tiny int4-g128", replace(_TINY, quant=INT4))
FP8_TINY = Shape("tiny fp8", replace(_TINY, quant=FP8))
MIXTURE_30B = Shape("30B-A3B bf16", _30B_A3B)
MIXTURE_TINY = Shape("tiny mixture bf16", _TINY_MIXTURE)

# small enough for float64; the variants below cover all code paths of the decoder
SMALL = replace(
    llama(
        layers=3,
        hidden=256,
        intermediate=512,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=1000,
        max_len=2048,
    ),
    attn_scale=1.0,  # otherwise attention with random weights is nearly uniform
)
CHECKED = (
    Shape("llama", SMALL),
    # random 4-bit values have a non-zero mean, which makes attention scores larger
    Shape("llama int4", replace(SMALL, quant=INT4, attn_scale=0.125)),
    Shape("llama fp8", replace(SMALL, quant=FP8)),
    Shape("llama int8 cache", SMALL, int8_cache=True),
    Shape(
        "gemma",
        replace(
            SMALL,
            norm_offset=True,
            sandwich_norms=True,
            qk_norm=True,
            attn_scale=0.125,  # products of normalized heads are larger
            activation="gelu_tanh",
            local_rope=Rope(theta=10_000.0, dim=64),
            sliding_windows=(48, None, 48),
            attn_softcap=50.0,
            logit_softcap=30.0,
            embed_scale=16.0,
            tied_embeddings=True,
        ),
    ),
    Shape("qwen", replace(SMALL, qk_norm=True, qkv_bias=True, attn_scale=0.125)),
    Shape(
        "mixture",
        replace(
            SMALL, moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=128, normalize_topk=True)
        ),
    ),
)


def checked_like(shape: Shape) -> str:
    """Name of the checked model with the formats of a measured one, a mixture for a mixture."""
    return next(small.name for small in CHECKED if _kind(small) == _kind(shape))


def _kind(shape: Shape) -> tuple[object, ...]:
    return shape.spec.quant, shape.spec.moe is None, shape.int8_cache


def with_layers(shape: Shape, layers: int) -> Shape:
    """The model with fewer layers, which its name says."""
    spec = shape.spec
    windows = spec.sliding_windows[:layers]
    name = f"{shape.name}, {layers} of {spec.num_layers} layers"
    return replace(shape, name=name, spec=replace(spec, num_layers=layers, sliding_windows=windows))
