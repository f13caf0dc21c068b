"""Checks before a quantization starts, and the prepared model that passes them."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import localgen
from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.folder import read_json
from localgen.backends.formats.hf.safetensors import FLOAT_DTYPES
from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.text_windows import TokenWindows, calibration_windows
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.files.packing import packing_multiple
from localgen.quant.request.events import OnEvent, ProgressEvent
from localgen.quant.request.recipe import CalibrationConfig, Recipe

_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedQuantization:
    """A model and a recipe that fits it. windows: calibration text; None if the recipe needs none.

    dtype: of the unquantized tensors of the result.
    """

    source: LayerwiseCheckpoint
    recipe: Recipe
    windows: TokenWindows | None
    dtype: torch.dtype
    device: torch.device

    @property
    def seq_len(self) -> int:
        """Tokens per window; 1 without windows."""
        return 1 if self.windows is None else self.windows.ids.shape[1]

    def resume_manifest(self, checksum: int) -> dict[str, Any]:
        """All that determines the result; a run can be resumed only with the same manifest."""
        windows = self.windows
        return {
            "localgen": localgen.__version__,
            "device": self.device.type,
            "arithmetic": str(calibration_dtype(self.device, self.source.spec.hidden_size)),
            "recipe": asdict(self.recipe),
            "calibration": None if windows is None else windows.digest,
            "model": {"bytes": self.source.size_bytes, "checksum": checksum},
        }


def prepare_quantization(
    folder: Path, recipe: Recipe, calibration: CalibrationConfig, device: torch.device | str
) -> PreparedQuantization:
    """Check everything that can be checked without reading the weights.

    Raises LoadFailed or ModelNotFound if the model is missing, damaged or of an unknown
    architecture, and InvalidRequest if it is quantized or the recipe or the text does not fit it.
    """
    require_unquantized(folder)
    source = LayerwiseCheckpoint(folder)
    # also without calibration: it checks the tokenizer
    tokenizer = HfTokenizer.from_folder(folder, source.spec.vocab_size)
    check_group_size(source.spec, recipe)
    _check_packing(source, recipe)
    windows = None
    if recipe.needs_calibration:
        longest = source.spec.max_len
        if not 2 <= calibration.seq_len <= longest:
            raise InvalidRequest(
                f"sequences of {calibration.seq_len:,} tokens do not fit: a sequence has 2 to "
                f"{longest:,} tokens, the context of the model; change --seq-len",
                param="seq_len",
            )
        windows = calibration_windows(calibration, tokenizer)
    return PreparedQuantization(
        source, recipe, windows, _output_dtype(source), torch.device(device)
    )


def require_unquantized(folder: Path) -> None:
    """Raise InvalidRequest if the folder's weights are quantized."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "some method")
        raise InvalidRequest(
            f"{folder.resolve().name} is already quantized ({method}): give the original model",
            param="model",
        )


def check_finite_and_checksum(source: LayerwiseCheckpoint, on_event: OnEvent) -> int:
    """Read all tensors and return their checksum. Raises LoadFailed if a value is not finite."""
    done, total, checksum = 0, source.size_bytes, 0
    for name in source.names():
        if source.location(name).dtype not in FLOAT_DTYPES:
            raise LoadFailed(f"{source.folder}: {name} is not an unquantized weight")
        for chunk in source.iter_chunks(name):
            if not bool(chunk.isfinite().all()):
                raise LoadFailed(
                    f"{source.location(name).path}: {name} has NaN or infinite values: "
                    "the file is damaged, download it again"
                )
            checksum = zlib.crc32(chunk.view(torch.uint8).numpy().data, checksum)
            done += chunk.nbytes
            on_event(ProgressEvent("checking weights", done, total, "bytes"))
    return checksum


def _output_dtype(source: LayerwiseCheckpoint) -> torch.dtype:
    """The model's dtype; for float32 the 16-bit dtype that its embedding fits."""
    if source.dtype is not torch.float32:
        return source.dtype
    chunks = source.iter_chunks("model.embed_tokens.weight")
    most = max(float(chunk.abs().max()) for chunk in chunks)
    return torch.float16 if most < _FLOAT16_MAX else torch.bfloat16


def _check_packing(source: LayerwiseCheckpoint, recipe: Recipe) -> None:
    multiple = packing_multiple(recipe)
    for name, (outs, ins) in linear_shapes(source.spec).items():
        if outs % multiple or ins % multiple:
            raise InvalidRequest(
                f"{name} of {ins:,} inputs and {outs:,} outputs cannot be packed in "
                f"{recipe.bits} bits, which needs multiples of {multiple}: use --fp8",
                param="bits",
            )


def check_group_size(spec: ModelSpec, recipe: Recipe) -> None:
    """Raise InvalidRequest if a linear's inputs do not divide into the recipe's groups."""
    size = recipe.group_size
    if not recipe.has_groups or size is None:
        return
    for name, (_, ins) in linear_shapes(spec).items():
        if ins % size:
            fitting = [str(g) for g in (256, 128, 64, 32, 16, 8) if not _is_indivisible(spec, g)]
            remedy = f"--group-size {' or '.join(fitting)}" if fitting else "another method"
            raise InvalidRequest(
                f"{name} has {ins} inputs, not divisible into groups of {size}: use {remedy}",
                param="group_size",
            )


def _is_indivisible(spec: ModelSpec, size: int) -> bool:
    return any(ins % size for _, ins in linear_shapes(spec).values())
