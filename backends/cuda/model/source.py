"""Model sources: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from localgen.backends.cuda.model.dequantize import dequantization_notes
from localgen.backends.cuda.model.gguf_weights import GgufWeightLoader
from localgen.backends.cuda.model.weights import DecoderWeights, build_weights, load_weights
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.spec import read_gguf_spec
from localgen.backends.formats.gguf.tokenizer import read_gguf_tokenizer
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.folder import read_chat_template, read_sampling_defaults
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.sampling_params import SAMPLERS, SamplingParams, model_sampling_defaults
from localgen.backends.sandbox import Sandbox


class ModelSource(Protocol):
    """A model on disk.

    path: the folder or file.
    notes: messages for the user about how the model is loaded.
    chat_template: None if the model has none.
    """

    path: Path
    spec: ModelSpec
    notes: tuple[str, ...]

    @property
    def chat_template(self) -> str | None: ...

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that the model computes in on this device."""
        ...

    def load_weights(
        self, device: torch.device, dtype: torch.dtype, shard: ModelShard | None = None
    ) -> DecoderWeights:
        """Load all weights, or those of a shard. Raises LoadFailed or OutOfMemory."""
        ...

    def load_tokenizer(self, sandbox: Sandbox | None = None) -> HfTokenizer:
        """Load the tokenizer. Raises LoadFailed if there is none or it does not match the model.

        sandbox: where text is encoded if the model brings regular expressions of its own, or None
        to run in this process.
        """
        ...

    def sampling_defaults(self) -> tuple[SamplingParams, tuple[str, ...]]:
        """The model's own sampling defaults, and notes on them."""
        ...


def open_model_source(path: Path) -> ModelSource:
    """Open the model at a path. Raises LoadFailed if it does not exist or is not supported."""
    if not path.exists():
        raise LoadFailed(f"cannot load {path}: it does not exist")
    if path.suffix.lower() == ".gguf":
        return open_gguf_source(path)
    return HfModelSource(path if path.is_dir() else path.parent)


class HfModelSource:
    """A Hugging Face folder with config.json, safetensors and tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = read_hf_config(path)
        self.notes = dequantization_notes(self.spec.quant, has_experts=self.spec.moe is not None)

    @property
    def chat_template(self) -> str | None:
        return read_chat_template(self.path)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """float16 for float16 checkpoints, else bfloat16; float32 on a CPU, where it is faster."""
        if device.type == "cpu":
            return torch.float32
        config = ConfigFields.from_file(self.path / "config.json").values
        name = config.get("dtype", config.get("torch_dtype"))
        return torch.float16 if name == "float16" else torch.bfloat16

    def load_weights(
        self, device: torch.device, dtype: torch.dtype, shard: ModelShard | None = None
    ) -> DecoderWeights:
        return load_weights(self.path, self.spec, device=device, dtype=dtype, shard=shard)

    def load_tokenizer(self, sandbox: Sandbox | None = None) -> HfTokenizer:
        return HfTokenizer.from_folder(self.path, self.spec.vocab_size, sandbox)

    def sampling_defaults(self) -> tuple[SamplingParams, tuple[str, ...]]:
        return read_sampling_defaults(self.path)


class GgufModelSource:
    """A GGUF file. path: the first part of a split file.

    All methods raise LoadFailed, naming the file.
    """

    notes: tuple[str, ...] = ("GGUF weights are dequantized to the compute dtype on load",)

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.spec = read_gguf_spec(file)
        self._file = file

    @property
    def chat_template(self) -> str | None:
        found = self._file.section("tokenizer.chat_template").values.get("")
        return found if isinstance(found, str) else None

    def sampling_defaults(self) -> tuple[SamplingParams, tuple[str, ...]]:
        """The model's own sampling defaults, and notes on them."""
        values = self._file.section("general.sampling.").values
        return model_sampling_defaults(
            {sampler.name: values.get(sampler.gguf_key) for sampler in SAMPLERS if sampler.hf_key}
        )

    def load_tokenizer(self, sandbox: Sandbox | None = None) -> HfTokenizer:
        return read_gguf_tokenizer(self._file, self.spec.vocab_size)

    def weight_loader(
        self, *, device: torch.device | str, dtype: torch.dtype, shard: ModelShard | None = None
    ) -> GgufWeightLoader:
        """The WeightLoader of this file. dtype: of all weights, which are dequantized."""
        return GgufWeightLoader(
            self._file, shard or ModelShard(self.spec), device=torch.device(device), dtype=dtype
        )

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """bfloat16, or float32 on a CPU, where 16-bit types are slow.

        GGUF does not record the training dtype, and float16 may overflow.
        """
        return torch.float32 if device.type == "cpu" else torch.bfloat16

    def load_weights(
        self, device: torch.device | str, dtype: torch.dtype, shard: ModelShard | None = None
    ) -> DecoderWeights:
        shard = shard or ModelShard(self.spec)
        tensors = self.weight_loader(device=device, dtype=dtype, shard=shard)
        weights = build_weights(
            tensors, shard.local_spec, name=str(self.path), device=torch.device(device)
        )
        tensors.check_all_read()
        return weights


def open_gguf_source(path: Path) -> GgufModelSource:
    """Open a GGUF file, or a split one by any of its parts. Raises LoadFailed."""
    return GgufModelSource(GgufFile(path))
