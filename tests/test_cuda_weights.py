"""Weights from plain checkpoints of every architecture, damaged checkpoints, and random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cuda_configs import write_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_checkpoints import State, assert_one_line, load, make, rewrite, shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

from localgen.backends.cuda.model.linear import DenseLinear, Linear
from localgen.backends.cuda.model.weights import DecoderWeights, LayerWeights, random_weights
from localgen.backends.formats.hf.config import read_hf_config

# one per architecture, and variants with other tensors
MODELS = [
    "llama",
    "llama biases",
    "llama tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi4 mini",
    "mixtral",
    "qwen3 moe",
]


def dense(linear: Linear | None) -> Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


def bias_of(linear: Linear | None) -> Tensor | None:
    assert isinstance(linear, DenseLinear)
    return linear.bias


def joined(state: State, prefix: str, parts: str, kind: str = "weight") -> Tensor | None:
    found = [state.get(f"{prefix}{part}_proj.{kind}") for part in parts.split()]
    return None if None in found else torch.cat([tensor for tensor in found if tensor is not None])


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs.to(ours.dtype))


def assert_same_layer(layer: LayerWeights, state: State, prefix: str, sandwich: bool) -> None:
    attention = f"{prefix}self_attn."
    fused = f"{attention}qkv_proj.weight" in state
    for kind, read in (("weight", dense), ("bias", bias_of)):
        qkv = joined(state, attention, "qkv" if fused else "q k v", kind)
        assert same(read(layer.qkv), qkv), kind
        assert same(read(layer.attention_out), state.get(f"{attention}o_proj.{kind}")), kind
        if layer.experts is None:
            gate_up = joined(state, f"{prefix}mlp.", "gate_up" if fused else "gate up", kind)
            assert same(read(layer.gate_up), gate_up), kind
            assert same(read(layer.down), state.get(f"{prefix}mlp.down_proj.{kind}")), kind
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    norms = {
        "input_layernorm": layer.input_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        before if sandwich else after: layer.mlp_norm,
        after if sandwich else before: layer.post_attention_norm,
        "post_feedforward_layernorm": layer.post_mlp_norm,
    }
    for name, norm in norms.items():
        assert same(norm, state.get(f"{prefix}{name}.weight")), name


def assert_same_experts(layer: LayerWeights, state: State, prefix: str) -> None:
    router = state.get(f"{prefix}mlp.gate.weight")
    assert (layer.experts is None) == (router is None)
    if layer.experts is not None:
        assert (layer.gate_up, layer.down) == (None, None)
        assert same(layer.experts.router.weight, router)
        assert same(layer.experts.gate_up, state[f"{prefix}mlp.experts.gate_up_proj"])
        assert same(layer.experts.down, state[f"{prefix}mlp.experts.down_proj"])


def assert_same_weights(weights: DecoderWeights, model: Any) -> None:
    state, sandwich = (
        model.state_dict(),
        hasattr(model.model.layers[0], "pre_feedforward_layernorm"),
    )
    assert same(weights.embed, state["model.embed_tokens.weight"])
    assert same(weights.norm, state["model.norm.weight"])
    assert same(dense(weights.head), state["lm_head.weight"])
    assert len(weights.layers) == model.config.num_hidden_layers
    for index, layer in enumerate(weights.layers):
        assert_same_layer(layer, state, f"model.layers.{index}.", sandwich)
        assert_same_experts(layer, state, f"model.layers.{index}.")


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_loaded_in_its_place(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    model.save_pretrained(tmp_path)
    assert_same_weights(load(tmp_path), model)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sharded_weights_are_read(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(load(tmp_path), model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_experts_in_separate_or_merged_tensors_are_read(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    model.save_pretrained(tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    assert any("experts.3." in name for name in names)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_weights(load(tmp_path), model)


def test_weights_are_converted_to_the_given_dtype(tmp_path: Path) -> None:
    model = make("qwen2", tmp_path)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, torch.bfloat16)
    assert weights.embed.dtype == dense(weights.layers[0].qkv).dtype == torch.bfloat16
    assert_same_weights(weights, model)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = make("llama tied", tmp_path)
    # some files have it twice
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    weights = load(tmp_path)
    assert dense(weights.head) is weights.embed


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make("llama", folder).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "llama"))


@pytest.mark.parametrize("cut", [1, 100, 5_000, 60_000])
def test_truncated_file_is_rejected(cut: int, llama: Path) -> None:
    path = llama / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    ends = {name: part["data_offsets"][1] for name, part in header.items() if name[0] != "_"}
    last = max(ends.values())
    first_cut = min((end, name) for name, end in ends.items() if end > last - cut)[1]
    assert_one_line(llama, "model.safetensors is cut short", first_cut, f"{len(raw) - cut:,}")


@pytest.mark.parametrize("raw", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_files_that_are_not_safetensors_are_rejected(raw: bytes, llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(raw)
    assert_one_line(llama, "model.safetensors cannot be read")


@pytest.mark.parametrize("size", [4, 9, 300])
def test_truncated_header_is_rejected(size: int, llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_one_line(llama, "model.safetensors cannot be read")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.2.mlp.down_proj.weight"]
)
def test_missing_tensor_is_reported(name: str, llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.pop(name))
    assert_one_line(llama, f"has no tensor {name}")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.ones(65), "is of shape [65], not [64]"),
        ("model.embed_tokens.weight", torch.ones(64, 96), "of shape [64, 96], not [96, 64]"),
        ("lm_head.weight", torch.ones(96, 64, dtype=torch.int32), "of type I32, not F32 or F16"),
        ("model.layers.3.input_layernorm.weight", torch.ones(64), "is not part of LlamaFor"),
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(16), "is not part of LlamaFor"),
        ("lm_head.qweight", torch.ones(8, 96), "is int4, but config.json has no quant"),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.ones(48, 64).to(torch.float8_e4m3fn),
            "is FP8, but config.json has no quant",
        ),
    ],
)
def test_tensor_of_wrong_shape_or_type_is_rejected(
    name: str, tensor: Tensor, message: str, llama: Path
) -> None:
    rewrite(llama, lambda tensors: tensors.update({name: tensor}))
    assert_one_line(llama, f"model.safetensors: {name}", message)


def test_unused_tensors_are_ignored(llama: Path) -> None:
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
    }
    rewrite(llama, lambda tensors: tensors.update(more))
    assert len(load(llama).layers) == 3


def test_folder_without_weights_is_rejected(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert_one_line(llama, "has no model.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "model-1.safetensors"}}, "has no model-1.safetensors"),
        ({"weight_map": {"a": "../../model.safetensors", "b": "gone"}}, "has no gone"),
        ({"weight_map": {"a": 1}}, "weight_map.a is 1, not a string"),
        ({}, "has no weight_map"),
        ([], "holds no JSON object"),
    ],
)
def test_invalid_shard_index_is_rejected(index: Any, message: str, llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_one_line(llama, message)


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_have_the_real_shapes(name: str, tmp_path: Path) -> None:
    make(name, tmp_path).save_pretrained(tmp_path)
    spec = read_hf_config(tmp_path)
    made_up = random_weights(spec, device="cpu", dtype=torch.float32, seed=1)
    assert shapes(made_up) == shapes(load(tmp_path))


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    one, again, other = (
        random_weights(spec, device="cpu", dtype=torch.float32, seed=seed).embed
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
