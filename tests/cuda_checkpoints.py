"""Tiny random checkpoints for the CUDA engine's loader, and what tests ask of it."""

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

from localgen.backends.cuda.spec import read_config
from localgen.backends.cuda.weights import Weights, load_weights
from localgen.backends.errors import LoadFailed

State = dict[str, Tensor]


def make(name: str, folder: Path) -> Any:
    """A random transformers model in float32, its config.json written to `folder`."""
    torch.manual_seed(len(name))
    config = transformers.AutoConfig.from_pretrained(write_config(folder, name))
    random: Any = transformers.AutoModelForCausalLM.from_config
    model = random(config)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def load(folder: Path, dtype: Any = torch.float32) -> Weights:
    return load_weights(folder, read_config(folder), device="cpu", dtype=dtype)


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
    """Types, shapes and dtypes, all the way down."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return [shapes(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [shapes(getattr(value, name)) for name in value.__dataclass_fields__]
    return value
