"""A GGUF file as a model to load: what it is, its weights, its tokenizer and its template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localgen.backends.cuda.gguf_tensors import GgufTensors
from localgen.backends.cuda.weights import Weights, build_weights
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.spec import read_gguf_spec
from localgen.backends.formats.gguf.tokenizer import read_gguf_tokenizer
from localgen.backends.formats.hf.generation_config import defaults_of
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.types import SamplingParams

# generation_config.json's names of what a file may have under general.sampling
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GgufCheckpoint:
    """A ModelSource. path: of the first part. Every reader raises LoadFailed, naming the file."""

    notes: tuple[str, ...] = ("weights of a GGUF file are widened to what the model computes in",)

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.spec = read_gguf_spec(file)
        self._file = file

    @property
    def chat_template(self) -> str | None:
        """The chat template; None where there is none."""
        found = self._file.section("tokenizer.chat_template").values.get("")
        return found if isinstance(found, str) else None

    @property
    def generation(self) -> dict[str, Any]:
        """The model's own sampling defaults, as a generation_config.json would have them."""
        found = self._file.section("general.sampling.").values
        return {_SAMPLING[key]: value for key, value in found.items() if key in _SAMPLING}

    def sampling(self) -> tuple[SamplingParams, tuple[str, ...]]:
        """The model's own sampling defaults, and notes on them."""
        return defaults_of(self.generation)

    def tokenizer(self) -> HfTokenizer:
        """LoadFailed: there is none, or of a kind that is not supported."""
        return read_gguf_tokenizer(self._file, self.spec.vocab)

    def tensors(
        self, *, device: torch.device | str, dtype: torch.dtype, shard: Shard | None = None
    ) -> GgufTensors:
        """The Tensors of this file. dtype: of all weights, which are dequantized."""
        return GgufTensors(
            self._file, shard or Shard(self.spec), device=torch.device(device), dtype=dtype
        )

    def dtype(self, device: torch.device) -> torch.dtype:
        """What the model computes in: bfloat16, for a file does not say what it was trained in
        and float16 may overflow; float32 on a CPU, which is slow at both."""
        return torch.float32 if device.type == "cpu" else torch.bfloat16

    def weights(
        self, device: torch.device | str, dtype: torch.dtype, shard: Shard | None = None
    ) -> Weights:
        """All weights, tensor by tensor straight to the device. LoadFailed, OutOfMemory."""
        shard = shard or Shard(self.spec)
        tensors = self.tensors(device=device, dtype=dtype, shard=shard)
        weights = build_weights(
            tensors, shard.local, name=str(self.path), device=torch.device(device)
        )
        tensors.check_all_read()
        return weights


def open_gguf(path: Path) -> GgufCheckpoint:
    """The model of a GGUF file, or of a split one by any of its parts. LoadFailed."""
    return GgufCheckpoint(GgufFile(path))
