"""A model on disk, whatever its format: what loading it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import torch

from localgen.backends.cuda.fields import Fields
from localgen.backends.cuda.spec import ModelSpec, read_config
from localgen.backends.cuda.tokenizer import HfTokenizer, chat_template, optional_json
from localgen.backends.cuda.weights import Weights, load_weights
from localgen.backends.engine import sampling
from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.types import BASE_SAMPLING, SamplingParams

# of generation_config.json, by our names
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}


class ModelSource(Protocol):
    """path: the folder or file. chat_template: None where there is none."""

    path: Path
    spec: ModelSpec

    @property
    def chat_template(self) -> str | None: ...

    def dtype(self, device: torch.device) -> torch.dtype:
        """What the model computes in on this device."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Read all of them. LoadFailed, OutOfMemory."""
        ...

    def tokenizer(self) -> HfTokenizer:
        """LoadFailed: there is none, or it does not suit the model."""
        ...

    def sampling(self) -> tuple[SamplingParams, tuple[str, ...]]:
        """The model's own sampling defaults, and notes on them."""
        ...


def open_source(path: Path) -> ModelSource:
    """The model at a path. LoadFailed: it is none, or none that can be run."""
    if not path.exists():
        raise LoadFailed(f"cannot load {path}: it does not exist")
    return HfFolder(path if path.is_dir() else path.parent)


class HfFolder:
    """A folder with config.json, safetensors and tokenizer.json, as Hugging Face has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = read_config(path)

    @property
    def chat_template(self) -> str | None:
        return chat_template(self.path)

    def dtype(self, device: torch.device) -> torch.dtype:
        """As ModelSource.dtype: float16 where the checkpoint has it, else bfloat16; float32 on
        a CPU, which is slow at both."""
        if device.type == "cpu":
            return torch.float32
        config = Fields.of_file(self.path / "config.json").values
        name = config.get("dtype", config.get("torch_dtype"))
        return torch.float16 if name == "float16" else torch.bfloat16

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        return load_weights(self.path, self.spec, device=device, dtype=dtype)

    def tokenizer(self) -> HfTokenizer:
        return HfTokenizer.of_folder(self.path, self.spec.vocab)

    def sampling(self) -> tuple[SamplingParams, tuple[str, ...]]:
        path = self.path / "generation_config.json"
        return _defaults(optional_json(path))


def _defaults(found: dict[str, Any]) -> tuple[SamplingParams, tuple[str, ...]]:
    # without do_sample, transformers takes the likeliest token and ignores the rest
    if found.get("do_sample") is False:
        return SamplingParams(temperature=0.0), ()
    values: dict[str, Any] = {}
    try:
        for field, key in _SAMPLING_KEYS.items():
            value = found.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{key} is {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{key} is {value}")
            values[field] = type(getattr(BASE_SAMPLING, field))(value)
        defaults = SamplingParams(**values)
        sampling.check(defaults.with_defaults(BASE_SAMPLING))
    except (LocalgenError, ValueError) as error:
        # or every request that names no settings of its own would fail
        return SamplingParams(), (f"the model's own sampling defaults are left out: {error}",)
    return defaults, ()
