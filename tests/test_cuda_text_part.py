"""Models that also take images: their text part is read from published and rewritten folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda_configs import VISION, write_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from cuda_checkpoints import make, rewrite
from cuda_models import Model, random_text
from hf_folders import edit
from safetensors.torch import load_file
from torch import Tensor

from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid, pack_int4
from localgen.backends.cuda.model.linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Linear,
    reorder_outputs,
)
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.config import read_hf_config, shape_from_hf_config
from localgen.backends.formats.model_files import model_folder
from localgen.backends.formats.weight_sizes import read_weight_sizes

TOLERANCE = 2e-4


def saved(name: str, folder: Path) -> Any:
    model = make(name, folder).eval()
    model.save_pretrained(folder)
    write_config(folder, name)
    return model


def logits(folder: Path, tokens: list[int]) -> Tensor:
    return Model(folder).step([(0, 0, tokens)])[0]


def as_in_transformers(stored: str) -> str:
    if stored.startswith("language_model.lm_head"):
        return stored.removeprefix("language_model.")
    if stored.startswith("language_model.model."):
        return "model.language_model." + stored.removeprefix("language_model.model.")
    return f"model.{stored}"


@pytest.mark.parametrize("name", ["gemma3 images", "mistral3 images"])
def test_both_layouts_of_tensor_names_are_read(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert "language_model.model.embed_tokens.weight" in stored
    tokens = random_text(seed=1, length=40)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert (logits(tmp_path, tokens) - theirs).abs().max() < TOLERANCE

    def rename(tensors: dict[str, Tensor]) -> None:
        for old in list(tensors):
            tensors[as_in_transformers(old)] = tensors.pop(old)

    rewrite(tmp_path, rename)
    assert not stored & set(load_file(tmp_path / "model.safetensors"))
    assert (logits(tmp_path, tokens) - theirs).abs().max() < TOLERANCE


def test_published_gemma_files_omit_most_fields(tmp_path: Path) -> None:
    """The values are those of transformers' class."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    vision = {**VISION, "model_type": "siglip_vision_model"}
    folder = write_config(tmp_path, "gemma3 images", text_config=text, vision_config=vision)
    spec = read_hf_config(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "rewritten")
    assert spec == read_hf_config(tmp_path / "rewritten")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.vocab_size == config.text_config.vocab_size
    assert spec.rope.theta == config.text_config.rope_parameters["full_attention"]["rope_theta"]
    shape = shape_from_hf_config({"architectures": ["x"], "text_config": text})
    assert shape is not None
    assert (shape.num_heads, shape.vocab_size, shape.ctx_train) == (8, spec.vocab_size, 131_072)


@pytest.mark.parametrize(("name", "tied"), [("mistral3 images", False), ("gemma3 images", True)])
def test_the_files_say_whether_the_head_is_the_embedding(
    name: str, tied: bool, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=not tied)
    assert read_hf_config(tmp_path).tied_embeddings == tied
    (tmp_path / "model.safetensors").unlink()
    assert read_hf_config(tmp_path).tied_embeddings != tied


def test_only_the_text_part_counts_as_memory(tmp_path: Path) -> None:
    saved("mistral3 images", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = sum(t.nbytes for name, t in tensors.items() if name.startswith("language_model."))
    assert text < sum(tensor.nbytes for tensor in tensors.values())
    assert read_weight_sizes(model_folder(tmp_path), None).size_bytes == text


def test_a_tensor_of_the_text_part_that_is_unknown_is_named_as_in_the_file(tmp_path: Path) -> None:
    saved("mistral3 images", tmp_path)
    name = "language_model.model.layers.0.extra.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(LoadFailed, match=f"{name} is not part of MistralForCausalLM"):
        Model(tmp_path)


def test_a_folder_without_text_config_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "mistral3 images")
    edit(folder / "config.json", text_config=None)
    with pytest.raises(LoadFailed, match="it has no text_config"):
        read_hf_config(folder)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_of_a_whole_fp8_matrix_may_be_named_as_an_inverse(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """As in Ministral 3."""
    saved("ministral3", tmp_path)
    tokens = random_text(seed=1, length=40)
    edit(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            linear = name.removesuffix(".weight")
            tensors[name] = (tensors[name] * 8).to(torch.float8_e4m3fn)
            tensors[f"{linear}.weight_scale_inv"] = torch.full(shape, 1 / 8)
            tensors[f"{linear}.activation_scale"] = torch.ones(shape)

    def dequantize(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("_proj.weight"):
                tensors[name] = tensors[name].float() / 8
            elif name.endswith(("_scale_inv", "activation_scale")):
                del tensors[name]

    rewrite(tmp_path, quantize)
    found = logits(tmp_path, tokens)
    rewrite(tmp_path, dequantize)
    # the kernel rounds inputs to FP8 too
    wanted = logits(tmp_path, tokens)
    assert (found - wanted).norm() / wanted.norm() < 0.1


def test_outputs_are_reordered_in_every_layout() -> None:
    """As for RoPE of neighbours (GLM 4, Ernie 4.5)."""
    order, bias = torch.randperm(16), torch.randn(16)
    packed = pack_int4(torch.randint(0, 16, (16, 64), dtype=torch.uint8))
    zeros = torch.randint(0, 16, (16, 2), dtype=torch.uint8)
    linears: list[Linear] = [
        DenseLinear(torch.randn(16, 64), bias),
        Fp8Linear(torch.randn(16, 64).to(torch.float8_e4m3fn), torch.rand(16), bias),
        Int4Linear(packed, pack_grid(torch.rand(16, 2), zeros), bias, torch.randperm(64)),
    ]
    x = torch.randn(3, 64)
    for linear in linears:
        torch.testing.assert_close(reorder_outputs(linear, order)(x), linear(x)[:, order])
