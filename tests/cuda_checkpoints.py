"""Tiny random checkpoints for the CUDA engine's loader, and assertions about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cuda_configs import write_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from localgen.backends.cuda.model.weights import DecoderWeights, load_weights
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.config import read_hf_config

State = dict[str, Tensor]


def begun(name: str, folder: Path) -> Any:
    """A transformers model in float32 with its initial weights; writes config.json to `folder`."""
    torch.manual_seed(sum(map(ord, name)))
    config = transformers.AutoConfig.from_pretrained(write_config(folder, name))
    has_images = hasattr(config, "vision_config")
    auto: Any = transformers.AutoModelForCausalLM
    if has_images:
        auto = transformers.AutoModelForImageTextToText
    return auto.from_config(config, attn_implementation="eager")


def make(name: str, folder: Path) -> Any:
    """As `begun`, with all weights random."""
    model = begun(name, folder)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def load(folder: Path, dtype: Any = torch.float32) -> DecoderWeights:
    return load_weights(folder, read_hf_config(folder), device="cpu", dtype=dtype)


def assert_one_line(folder: Path, *parts: str) -> None:
    with pytest.raises(LoadFailed) as failure:
        load(folder)
    text = str(failure.value)
    assert [part for part in parts if part not in text] == []
    assert "\n" not in text
    assert "model.safetensors" in text or str(folder) in text


def rewrite(folder: Path, change: Callable[[State], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shapes(value: Any) -> Any:
    """Types, shapes and dtypes of all tensors, recursively."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return [shapes(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [shapes(getattr(value, name)) for name in value.__dataclass_fields__]
    return value
