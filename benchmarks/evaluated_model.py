"""A model that is quantized in memory, and its losses on localgen's held-out text by window."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import packaged_model
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.layer_forward import (
    CalibrationLayer,
    LayerForward,
    compute_logits,
    embed_tokens,
)
from localgen.quant.calibrate.text_windows import calibration_windows, held_out_windows
from localgen.quant.evaluate import EvalMetrics
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.methods.layer import quantize_layer
from localgen.quant.request.recipe import CalibrationConfig, Recipe

WINDOW = 512
MODEL = Path(__file__).parents[1] / "localgen" / "models" / "tiny"
# windows per batch
_BATCH = 4


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Windows of the calibration text and of the held-out text."""

    calibration: int
    held_out: int


# smollm2: log probabilities of 49,152 tokens at each position of the held-out text are kept
SIZES = {"tiny": TextSizes(128, 135), "smollm2": TextSizes(24, 36)}


class EvaluatedModel:
    """A Hugging Face folder, its calibration text and its held-out text.

    calibration: int64 [windows, WINDOW]. domains: of each window of the held-out text.
    text: another one in place of localgen's.
    """

    def __init__(
        self, folder: Path, tokenizer: HfTokenizer, sizes: TextSizes, text: Path | None = None
    ) -> None:
        self.spec = read_hf_config(folder)
        self._checkpoint = NumpyCheckpoint(folder)
        self._embedding = self._read("model.embed_tokens.weight")
        self._forward = LayerForward(self.spec, WINDOW)
        # the same dtype as `localgen quantize` uses
        dtype = calibration_dtype(torch.device("cpu"), self.spec.hidden_size)
        self._calibrating = LayerForward(self.spec, WINDOW, dtype=dtype)
        asked = CalibrationConfig(samples=sizes.calibration, seq_len=WINDOW)
        self.calibration = calibration_windows(asked, tokenizer).ids
        held_out = held_out_windows(text, tokenizer, WINDOW + 1, sizes.held_out)
        self._held_out = held_out.ids
        self.domains: Sequence[str] = held_out.domains or ("",) * len(held_out.ids)

    def losses(self, recipe: Recipe | None) -> EvalMetrics:
        """Quantize the model with a recipe, or keep the original if None, and evaluate it."""
        layers = [self._layer(index) for index in range(self.spec.num_layers)]
        if recipe is None:
            return EvalMetrics(self._losses(layers).window_nll)
        return self._losses(self._quantized(layers, recipe))

    def folder_losses(self, quantized: LayerwiseCheckpoint) -> EvalMetrics:
        """Losses with the layers of a quantized folder of the same model."""
        return self._losses([quantized.read_layer(index) for index in range(self.spec.num_layers)])

    def _losses(self, layers: list[LayerTensors]) -> EvalMetrics:
        nll, kl = list[float](), list[float]()
        batches = torch.split(self._held_out, _BATCH)
        for batch, original in zip(batches, self._original, strict=True):
            found = self._log_shares(layers, batch)
            nll += (-found.gather(-1, batch[:, 1:, None])).squeeze(-1).double().mean(-1).tolist()
            apart = functional.kl_div(found, original, reduction="none", log_target=True)
            kl += apart.sum(-1, dtype=torch.float64).mean(-1).tolist()
        return EvalMetrics(np.array(nll), np.array(kl))

    @cached_property
    def _original(self) -> list[Tensor]:
        layers = [self._layer(index) for index in range(self.spec.num_layers)]
        return [self._log_shares(layers, batch) for batch in torch.split(self._held_out, _BATCH)]

    def _quantized(self, layers: list[LayerTensors], recipe: Recipe) -> list[LayerTensors]:
        """Quantize layer by layer; each is calibrated with the outputs of the quantized ones."""
        found = []
        run = self._calibrating.run
        hidden = original = embed_tokens(self.spec, self._embedding, self.calibration)
        for index, layer in enumerate(layers):
            given, beside = torch.split(hidden, _BATCH), torch.split(original, _BATCH)
            if recipe.needs_originals:
                original = torch.cat([run(index, layer, part) for part in beside])
            taken = CalibrationLayer(
                index,
                layer,
                partial(iter, given),
                self._calibrating,
                partial(iter, beside),
                partial(iter, torch.split(original, _BATCH)),
            )
            found.append(quantize_layer(taken, recipe).dequantize())
            hidden = torch.cat([run(index, found[-1], part) for part in given])
        return found

    def _log_shares(self, layers: list[LayerTensors], ids: Tensor) -> Tensor:
        """Log probabilities of the next tokens, float32 [windows, WINDOW, vocab]."""
        hidden = embed_tokens(self.spec, self._embedding, ids[:, :-1])
        for index, layer in enumerate(layers):
            hidden = self._forward.run(index, layer, hidden)
        norm = self._read("model.norm.weight")
        return compute_logits(self.spec, norm, self._embedding, hidden).log_softmax(-1)

    def _layer(self, index: int) -> LayerTensors:
        prefix = f"model.layers.{index}."
        names = [name for name in self._checkpoint.names() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self._checkpoint.read(name)))


@contextlib.contextmanager
def opened_model(name: str, sizes: TextSizes, text: Path | None = None) -> Iterator[EvaluatedModel]:
    """Open the built-in model, or smollm2 widened to a folder of 16 bits; see EvaluatedModel."""
    if name == BUILT_IN_MODEL:
        vocab_size = read_hf_config(MODEL).vocab_size
        yield EvaluatedModel(MODEL, HfTokenizer.from_folder(MODEL, vocab_size), sizes, text)
        return
    # transformers is imported only where smollm2 is measured
    from benchmarks.agreement_parts.logits import transformers_model

    path = packaged_model(name).path
    source = open_gguf_source(path)
    with tempfile.TemporaryDirectory() as folder:
        transformers_model(path, source.spec).save_pretrained(folder)
        yield EvaluatedModel(Path(folder), source.load_tokenizer(), sizes, text)
