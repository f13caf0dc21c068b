"""A model on disk, whatever its format: what loading it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from localgen.backends.cuda.weights import Weights, load_weights
from localgen.backends.cuda.widening import notes
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import Fields
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.formats.hf.config import read_config
from localgen.backends.formats.hf.generation_config import defaults_of
from localgen.backends.formats.hf.tokenizer import HfTokenizer, chat_template, optional_json
from localgen.backends.types import SamplingParams


class ModelSource(Protocol):
    """path: the folder or file. chat_template: None where there is none. notes: what a user should
    know of how it is read."""

    path: Path
    spec: ModelSpec
    notes: tuple[str, ...]

    @property
    def chat_template(self) -> str | None: ...

    def dtype(self, device: torch.device) -> torch.dtype:
        """What the model computes in on this device."""
        ...

    def weights(
        self, device: torch.device, dtype: torch.dtype, shard: Shard | None = None
    ) -> Weights:
        """Read all of them, or those of a shard. LoadFailed, OutOfMemory."""
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
    if path.suffix.lower() == ".gguf":
        # brings the gguf package, which folders do without
        from localgen.backends.cuda.gguf_checkpoint import open_gguf

        return open_gguf(path)
    return HfFolder(path if path.is_dir() else path.parent)


class HfFolder:
    """A folder with config.json, safetensors and tokenizer.json, as Hugging Face has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = read_config(path)
        self.notes = notes(self.spec.quant, experts=self.spec.moe is not None)

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

    def weights(
        self, device: torch.device, dtype: torch.dtype, shard: Shard | None = None
    ) -> Weights:
        return load_weights(self.path, self.spec, device=device, dtype=dtype, shard=shard)

    def tokenizer(self) -> HfTokenizer:
        return HfTokenizer.of_folder(self.path, self.spec.vocab)

    def sampling(self) -> tuple[SamplingParams, tuple[str, ...]]:
        path = self.path / "generation_config.json"
        return defaults_of(optional_json(path))
