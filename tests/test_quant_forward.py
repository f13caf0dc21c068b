"""The layer forward's logits equal transformers', for every architecture; taps see all inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_models import QUANTIZABLE, make, random_text
from safetensors.torch import load_file
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.tensor_names import (
    LayerTensors,
    layer_names,
    linear_shapes,
    split_fused_experts,
)
from localgen.quant.calibrate.layer_forward import LayerForward, compute_logits, embed_tokens

LENGTH = 90


def layers_of(spec: ModelSpec, tensors: LayerTensors) -> list[LayerTensors]:
    return [
        split_fused_experts(
            spec,
            {
                name.removeprefix(f"model.layers.{index}."): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"model.layers.{index}.")
            },
        )
        for index in range(spec.num_layers)
    ]


def ours(spec: ModelSpec, tensors: LayerTensors, ids: Tensor) -> Tensor:
    forward = LayerForward(spec, ids.shape[1])
    embedding = tensors["model.embed_tokens.weight"]
    hidden = embed_tokens(spec, embedding, ids)
    for index, layer in enumerate(layers_of(spec, tensors)):
        hidden = forward.run(index, layer, hidden)
    head = embedding if spec.tied_embeddings else tensors["lm_head.weight"]
    return compute_logits(spec, tensors["model.norm.weight"], head, hidden)


def two_texts() -> Tensor:
    return torch.tensor([random_text(seed=seed, length=LENGTH) for seed in (1, 2)])


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path)
    ids = two_texts()
    with torch.inference_mode():
        wanted = theirs(ids).logits.float()
    found = ours(read_hf_config(tmp_path), load_file(tmp_path / "model.safetensors"), ids)
    assert (found - wanted).abs().max().item() < 2e-4


def test_linears_in_bfloat16_are_near(tmp_path: Path) -> None:
    make("llama", tmp_path)
    spec = read_hf_config(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.0."
    layer = {name.removeprefix(at): t for name, t in tensors.items() if name.startswith(at)}
    hidden = torch.randn(2, LENGTH, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = LayerForward(spec, LENGTH).run(0, layer, hidden)
    seen: set[torch.dtype] = set()
    forward = LayerForward(spec, LENGTH, dtype=torch.bfloat16)
    found = forward.run(0, layer, hidden, lambda _, x: seen.add(x.dtype))
    assert seen == {torch.bfloat16}
    assert found.dtype == torch.float32
    error = (found - wanted).norm() / (wanted - hidden).norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_taps_see_the_input_of_every_linear(name: str, tmp_path: Path) -> None:
    """The shapes from linear_shapes are those of the weights."""
    make(name, tmp_path)
    spec = read_hf_config(tmp_path)
    layer = layers_of(spec, load_file(tmp_path / "model.safetensors"))[0]
    seen: dict[str, Tensor] = {}
    hidden = torch.randn(2, LENGTH, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    LayerForward(spec, LENGTH).run(0, layer, hidden, lambda name, x: seen.update({name: x}))
    shapes = linear_shapes(spec)
    assert {linear: tuple(layer[f"{linear}.weight"].shape) for linear in shapes} == shapes
    router = layer_names(spec).router
    assert set(seen) == set(shapes) | ({router} if router else set())
    assert [n for n, (_, ins) in shapes.items() if seen[n].shape[1] != ins] == []
    if spec.moe is None:
        assert {x.shape[0] for x in seen.values()} == {2 * LENGTH}
    else:
        routed = sum(
            seen[name].shape[0]
            for name in shapes
            if name.startswith(layer_names(spec).down.split("{")[0])
        )
        assert routed == 3 * 2 * LENGTH * spec.moe.top_k


def test_experts_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    spec = read_hf_config(tmp_path)
    layer = layers_of(spec, load_file(tmp_path / "model.safetensors"))[0]
    block = "block_sparse_moe.experts"
    experts = range(4)
    joint = {name: tensor for name, tensor in layer.items() if "block_sparse" not in name} | {
        "mlp.gate.weight": layer["block_sparse_moe.gate.weight"],
        "mlp.experts.gate_up_proj": torch.stack(
            [torch.cat([layer[f"{block}.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in experts]
        ),
        "mlp.experts.down_proj": torch.stack([layer[f"{block}.{e}.w2.weight"] for e in experts]),
    }
    found = split_fused_experts(spec, joint)
    assert set(found) == set(layer)
    assert [name for name in layer if not torch.equal(found[name], layer[name])] == []
