"""Checkpoints that are dequantized on load equal the same models in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_folders import edit
from quant_gptq_layout import gptq_parts

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_checkpoints import assert_one_line, load, rewrite
from cuda_models import Model, make, random_text
from safetensors.torch import save_file

from localgen.backends.cuda.model.source import HfModelSource
from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.sharding import ensure_divisible
from localgen.backends.formats.hf.config import read_hf_config
from localgen.quant.files.packing import (
    GroupedWeight,
    QuantizedWeight,
    RowWeight,
    is_symmetric,
    pack_linear,
    packing_layout,
    quantization_config,
)
from localgen.quant.request.recipe import Recipe

GROUP = 16
WIDE = {"intermediate_size": 96, "moe_intermediate_size": 96}
RECIPES = {
    "packed 2": Recipe(method="gptq", bits=2, group_size=GROUP),
    "packed 3": Recipe(method="gptq", bits=3, group_size=GROUP),
    "packed 8": Recipe(method="gptq", bits=8, group_size=GROUP),
    "awq 4": Recipe(method="awq", group_size=GROUP),
    "int8": Recipe(method="smoothquant", bits=8),
    "fp8": Recipe(method="fp8", bits=8),
}


# read, not written
OTHERS = {f"gptq {bits}": bits for bits in (2, 3, 4, 8)}


def rounded(weight: torch.Tensor, recipe: Recipe, *, ordered: bool = True) -> QuantizedWeight:
    """Random codes: any will do, as long as all readers agree on the weight."""
    outs, ins = weight.shape
    if not recipe.has_groups:
        dtype = torch.float8_e4m3fn if recipe.method == "fp8" else torch.int8
        scales = weight.abs().amax(1, keepdim=True) / 100
        return RowWeight((weight / scales).to(dtype), scales)
    zeros = torch.randint(0, 2**recipe.bits, (outs, ins // GROUP), dtype=torch.uint8)
    if is_symmetric(recipe.bits):
        zeros.fill_(2 ** (recipe.bits - 1))
    return GroupedWeight(
        codes=torch.randint(0, 2**recipe.bits, (outs, ins), dtype=torch.uint8),
        scales=(torch.rand(outs, ins // GROUP) / 2**recipe.bits / 8).half().float(),
        zeros=zeros,
        bits=recipe.bits,
        group_index=None if ordered else (torch.randperm(ins) // GROUP).int(),
    )


def both(name: str, kind: str, folder: Path) -> tuple[Path, Path]:
    """A random model quantized, and the same model with the dequantized weights."""
    bits = OTHERS.get(kind)
    recipe = RECIPES[kind] if bits is None else Recipe(method="rtn", bits=bits, group_size=GROUP)
    packed, plain = folder / "packed", folder / "plain"
    for path in (packed, plain):
        path.mkdir(parents=True)
        model = make(name, path)
    # one tensor per expert, as in published files
    quantized, dense = {}, {}
    for key, tensor in split(model.state_dict()).items():
        linear = key.removesuffix(".weight")
        if not linear.endswith(("_proj", ".w1", ".w2", ".w3")):
            quantized[key] = dense[key] = tensor
            continue
        weight = rounded(tensor, recipe, ordered=bits is None)
        dense[key] = weight.dequantize().contiguous()
        if bits is None:
            parts = pack_linear(weight, packing_layout(recipe))
        else:
            assert isinstance(weight, GroupedWeight)
            parts = gptq_parts(weight, 1)
        quantized |= {f"{linear}.{part}": value for part, value in parts.items()}
    save_file(quantized, packed / "model.safetensors")
    save_file(dense, plain / "model.safetensors")
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False}
    if bits is None:
        config = quantization_config(recipe, [])
    edit(packed / "config.json", quantization_config=config)
    return packed, plain


def split(state: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, tensor in state.items():
        if key.endswith("experts.gate_up_proj"):
            for index, both_parts in enumerate(tensor):
                gate, up = both_parts.chunk(2)
                at = key.replace("gate_up_proj", str(index))
                found[f"{at}.gate_proj.weight"] = gate.clone()
                found[f"{at}.up_proj.weight"] = up.clone()
        elif key.endswith("experts.down_proj"):
            for index, down in enumerate(tensor):
                at = key.replace("down_proj", f"{index}.down_proj")
                found[f"{at}.weight"] = down.clone()
        else:
            found[key] = tensor.clone()
    return found


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that 3-bit packing divides."""
    import cuda_configs

    monkeypatch.setitem(cuda_configs.SIZES, "intermediate_size", 96)
    kind, own = cuda_configs.CONFIGS["qwen3 moe"]
    monkeypatch.setitem(cuda_configs.CONFIGS, "qwen3 moe", (kind, {**own, **WIDE}))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("llama", kind) for kind in ("packed 3", "packed 8", "gptq 3", "gptq 8", "int8")),
        *(("qwen3 moe", kind) for kind in (*RECIPES, *OTHERS)),
    ],
)
def test_logits_equal_those_of_the_dequantized_model(model: str, kind: str, tmp_path: Path) -> None:
    packed, plain = both(model, kind, tmp_path)
    text = random_text(seed=1, length=40)
    got, wanted = (Model(path).step([(0, 0, text)])[0] for path in (packed, plain))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    (note,) = HfModelSource(packed).notes
    assert "dequantized on load" in note
    assert HfModelSource(plain).notes == ()


def test_four_bit_weights_are_not_dequantized(tmp_path: Path) -> None:
    packed, _ = both("llama", "gptq 4", tmp_path)
    assert HfModelSource(packed).notes == ()


def test_three_bit_weights_cannot_be_divided_among_ranks(tmp_path: Path) -> None:
    packed, _ = both("llama", "gptq 3", tmp_path)
    with pytest.raises(InvalidRequest, match="weights of 3 bits cannot be divided by 2: use 1"):
        ensure_divisible(read_hf_config(packed), 2)


def test_group_index_out_of_range_is_rejected(tmp_path: Path) -> None:
    packed, _ = both("llama", "gptq 8", tmp_path)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    rewrite(packed, lambda tensors: tensors.update({name: tensors[name] + 9}))
    assert_one_line(packed, f"{name} has group indices beyond 4")


def test_int8_without_quantization_config_is_rejected(tmp_path: Path) -> None:
    packed, _ = both("llama", "int8", tmp_path)
    edit(packed / "config.json", quantization_config=None)
    assert_one_line(packed, "is int8, but config.json has no quantization_config")


def test_dequantized_weights_have_the_given_dtype(tmp_path: Path) -> None:
    packed, _ = both("llama", "int8", tmp_path)
    weights = load(packed, torch.bfloat16)
    assert weights.layers[0].attention_out.weight.dtype == torch.bfloat16  # type: ignore[attr-defined]
