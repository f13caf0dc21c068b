"""config.json to ModelSpec: equal to transformers' reading of it, or a one-line error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cuda_configs import CONFIGS, SIZES, config_json, longrope, write_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import (
    ModelSpec,
    MoeConfig,
    QuantizationConfig,
)
from localgen.backends.formats.architecture.rope import LongRopeScaling, Rope
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.tensor_names import layer_names

JUNK: list[Any] = ["x", "", -1, 0, 1.5, True, [], [1], ["a"], {}, {"a": 1}, 1e999, 10**400]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}


def as_transformers_writes(folder: Path) -> Path:
    """The same config.json rewritten by transformers: newer fields, older ones gone."""
    target = folder / "rewritten"
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(target)
    return target


def windows_of(config: Any) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def assert_same_shape(spec: ModelSpec, config: Any, model: Any) -> None:
    attention = model.layers[0].self_attn
    assert spec.hidden_size == config.hidden_size
    assert spec.head_dim == attention.head_dim
    assert spec.num_kv_heads * attention.num_key_value_groups == spec.num_heads
    assert spec.attn_scale == pytest.approx(attention.scaling)
    assert spec.sliding_windows == windows_of(config)
    assert spec.attn_softcap == getattr(config, "attn_logit_softcapping", None)
    assert spec.logit_softcap == getattr(config, "final_logit_softcapping", None)
    assert spec.qk_norm == hasattr(attention, "q_norm")
    assert spec.fused_projections == hasattr(attention, "qkv_proj")
    names = layer_names(spec)
    norms = {name for name, _ in model.layers[0].named_children() if "norm" in name}
    before, after = (
        {names.attention_norm, names.mlp_norm},
        {names.post_attention_norm, names.post_mlp_norm},
    )
    assert norms == (before | after) - {""}
    assert spec.out_bias == (attention.o_proj.bias is not None)
    assert spec.qkv_bias == (not spec.fused_projections and attention.q_proj.bias is not None)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.max_len == config.max_position_embeddings


def assert_same_tables(rope: Rope, max_len: int, rotary: Any, **kind: str) -> None:
    cos, sin = rope.cos_sin_table(max_len)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (max_len, rope.dim // 2)
    theirs = rotary(torch.zeros(1), torch.arange(max_len)[None], **kind)
    for ours, table in zip((cos, sin), theirs, strict=True):
        both_halves = torch.cat((ours, ours), dim=-1)
        # a rounding of one frequency, times the position
        torch.testing.assert_close(both_halves, table[0], atol=max_len * 5e-7, rtol=0)


@pytest.mark.parametrize("rewritten", [False, True], ids=["public", "rewritten"])
@pytest.mark.parametrize("name", CONFIGS)
def test_spec_equals_that_of_transformers(name: str, rewritten: bool, tmp_path: Path) -> None:
    folder = write_config(tmp_path, name)
    folder = as_transformers_writes(folder) if rewritten else folder
    spec, config = read_hf_config(folder), transformers.AutoConfig.from_pretrained(folder)
    make: Any = transformers.AutoModel.from_config
    model = make(config)
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert spec.text_only == hasattr(model, "language_model")
    config, model = getattr(config, "text_config", config), getattr(model, "language_model", model)
    assert_same_shape(spec, config, model)
    # LongRoPE changes its factors beyond the 128 tokens it was trained with
    for max_len in (100, 400):
        if spec.local_rope is None:
            assert_same_tables(spec.rope, max_len, model.rotary_emb)
        else:
            kinds = {"full_attention": spec.rope, "sliding_attention": spec.local_rope}
            for kind, rope in kinds.items():
                assert_same_tables(rope, max_len, model.rotary_emb, layer_type=kind)


def test_both_forms_of_a_file_say_the_same(tmp_path: Path) -> None:
    for name in CONFIGS:
        folder = write_config(tmp_path / name, name)
        assert read_hf_config(folder) == read_hf_config(as_transformers_writes(folder)), name


def test_gemma_is_unlike_the_others(tmp_path: Path) -> None:
    gemma = read_hf_config(write_config(tmp_path / "gemma", "gemma3"))
    assert (gemma.norm_offset, gemma.activation, gemma.tied_embeddings) == (True, "gelu_tanh", True)
    assert gemma.embed_scale == math.sqrt(gemma.hidden_size)
    llama = read_hf_config(write_config(tmp_path / "llama", "llama"))
    assert (llama.norm_offset, llama.activation, llama.tied_embeddings) == (False, "silu", False)
    assert llama.embed_scale == 1.0


def test_experts_are_read_from_the_config(tmp_path: Path) -> None:
    mixtral = read_hf_config(write_config(tmp_path / "a", "mixtral"))
    assert mixtral.moe == MoeConfig(
        num_experts=4, top_k=2, intermediate_size=48, normalize_topk=True
    )
    qwen = read_hf_config(write_config(tmp_path / "b", "qwen3 moe window"))
    assert qwen.moe == MoeConfig(num_experts=4, top_k=2, intermediate_size=40, normalize_topk=False)
    assert read_hf_config(write_config(tmp_path / "c", "qwen3")).moe is None


def test_yarn_raises_the_length(tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "qwen3 yarn", max_position_embeddings=160))
    assert spec.max_len == 512


def test_one_table_holds_one_set_of_factors(tmp_path: Path) -> None:
    rope = read_hf_config(write_config(tmp_path, "phi3 longrope")).rope
    assert isinstance(rope.scaling, LongRopeScaling)
    assert torch.equal(rope.inv_freq(128), 2 * rope.inv_freq(129))


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_longrope_under_its_earlier_names(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_scaling": longrope(kind, 16)}
    first = read_hf_config(write_config(tmp_path / "first", "phi3 longrope", **scaling))
    assert first == read_hf_config(write_config(tmp_path / "later", "phi3 longrope"))


def packed(**weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors' pack-quantized format."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4, **weights}}},
    }


@pytest.mark.parametrize(
    ("quantization", "quant"),
    [
        (AWQ, QuantizationConfig(method="awq", bits=4, group_size=32, zero_point=True)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
            QuantizationConfig(method="awq", bits=4, group_size=64, zero_point=True),
        ),
        (
            GPTQ,
            QuantizationConfig(
                method="gptq",
                bits=4,
                group_size=128,
                zero_point=True,
                desc_act=True,
                zero_offset=1,
            ),
        ),
        (
            {**GPTQ, "group_size": -1, "sym": True, "checkpoint_format": "gptq_v2"},
            QuantizationConfig(
                method="gptq", bits=4, group_size=None, desc_act=True, zero_offset=0
            ),
        ),
        ({"quant_method": "fbgemm_fp8"}, QuantizationConfig(method="fp8", bits=8)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
                },
            },
            QuantizationConfig(method="fp8", bits=8),
        ),
        (
            packed(strategy="group", group_size=64, symmetric=False),
            QuantizationConfig(method="pack-quantized", bits=4, group_size=64, zero_point=True),
        ),
        (
            packed(num_bits=8, strategy="channel", actorder="weight"),
            QuantizationConfig(method="pack-quantized", bits=8),
        ),
    ],
)
def test_quantization_config_is_read(
    quantization: dict[str, Any], quant: QuantizationConfig, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, "llama", quantization_config=quantization)
    assert read_hf_config(folder).quant == quant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "bits is 8, only 4"),
        ({"group_size": 100}, "group_size is 100, not a multiple of 8"),
        ({"group_size": None}, "has no quantization_config.group_size"),
        ({"group_size": 0}, "group_size is 0"),
        ({"version": "gemv"}, "layout gemv"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "scale per block"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "layout marlin"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}},
            },
            "kind int4 per tensor",
        ),
        (packed(strategy="tensor"), "pack-quantized weights per tensor are not supported"),
        (packed(num_bits=9, strategy="channel"), "num_bits is 9, only 2, 3, 4, 5, 6, 7 and 8 are"),
        (packed(strategy="channel", actorder="group"), "(actorder group) are not supported"),
    ],
)
def test_unsupported_quantization_is_rejected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, "llama", quantization_config={**AWQ, **changes})
    assert_one_line(folder, message)


def assert_one_line(folder: Path, message: str) -> None:
    with pytest.raises(LoadFailed) as failure:
        read_hf_config(folder)
    text = str(failure.value)
    assert message in text
    assert "config.json" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"architectures": ["BertForMaskedLM"]}, "architecture BertForMaskedLM is not"),
        ("llama", {"architectures": ["BertForMaskedLM"]}, "Qwen3Moe"),
        ("llama", {"architectures": None}, "has no architectures"),
        ("llama", {"architectures": []}, "architecture none"),
        ("llama", {"hidden_act": "relu"}, 'hidden_act is "relu", not silu or'),
        ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ("llama", {"hidden_size": "64"}, 'hidden_size is "64", not a positive integer'),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaling dynamic is not"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "has no rope_scaling.factor"),
        ("llama", {"rope_scaling": "linear"}, 'rope_scaling is "linear", not an object'),
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": -1}, "rope_theta"),
        ("llama", {"head_dim": 15}, "15 rotary dimensions do not fit"),
        ("qwen3", {"head_dim": None}, "has no head_dim"),
        ("qwen2", {"rope_theta": None}, "has no rope_theta"),
        ("gemma2", {"sliding_window": None}, "has no sliding_window"),
        ("gemma3 listed", {"layer_types": ["full_attention"]}, "layer_types has 1 values"),
        ("gemma3 listed", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"full_attention": {}}}, "no sliding_attention"),
        ("phi3 longrope", {"rope_scaling": longrope("longrope", 12)}, "has 6 values, 8 are needed"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, there are 4"),
        ("qwen3 moe", {"mlp_only_layers": [0]}, "layers without experts"),
    ],
)
def test_unsupported_configs_are_rejected(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    needed = {
        key: value for key, value in config_json(name, **changes).items() if value is not None
    }
    (tmp_path / "config.json").write_text(json.dumps(needed))
    assert_one_line(tmp_path, message)


@pytest.mark.parametrize("field", [*(key for key in SIZES if "token" not in key)])
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "qwen3", **{field: None})
    if field == "num_key_value_heads":  # one for each head, as it once was
        assert read_hf_config(folder).num_kv_heads == SIZES["num_attention_heads"]
    else:
        assert_one_line(folder, f"has no {field}")


@pytest.mark.parametrize("name", CONFIGS)
def test_no_value_of_a_field_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    whole = config_json(name, quantization_config={**GPTQ} if "moe" not in name else None)
    refused = 0
    for part in [whole, *(value for value in whole.values() if isinstance(value, dict))]:
        for key, original in list(part.items()):
            for junk in JUNK:
                part[key] = junk
                (tmp_path / "config.json").write_text(json.dumps(whole))
                try:
                    read_hf_config(tmp_path)
                except LoadFailed:
                    refused += 1
            part[key] = original
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\xff"])
def test_invalid_config_file_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert_one_line(tmp_path, "config.json")


def test_missing_config_is_reported(tmp_path: Path) -> None:
    assert_one_line(tmp_path, "has no config.json")
