"""What is refused before any work starts, and what is known once nothing was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import localgen
from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.folder import read_json
from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.text_windows import TokenWindows, calibration_windows
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint, iter_checked_chunks
from localgen.quant.files.packing import packing_multiple
from localgen.quant.request.recipe import CalibrationConfig, Recipe

_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedQuantization:
    """A model that a recipe fits. windows: None where the recipe does not calibrate.

    dtype: of what is not quantized, in the result.
    """

    source: LayerwiseCheckpoint
    tokenizer: HfTokenizer
    recipe: Recipe
    windows: TokenWindows | None
    dtype: torch.dtype
    device: torch.device

    @property
    def seq_len(self) -> int:
        """Tokens of a window; 1 where there are none."""
        return 1 if self.windows is None else self.windows.ids.shape[1]

    def resume_manifest(self, checksum: int) -> dict[str, Any]:
        """What decides the result: a run of another plan cannot be gone on with."""
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
    """Check all that can be checked without reading the weights.

    LoadFailed, ModelNotFound: no such model, of an unknown kind, or damaged. InvalidRequest: it is
    quantized, or the recipe or the text does not suit it.
    """
    require_unquantized(folder)
    source = LayerwiseCheckpoint(folder)
    tokenizer = HfTokenizer.from_folder(folder, source.spec.vocab_size)
    check_group_size(source.spec, recipe)
    _check_packing(source, recipe)
    windows = None
    if recipe.needs_calibration:
        longest = source.spec.max_len
        if not 2 <= calibration.seq_len <= longest:
            raise InvalidRequest(
                f"a sequence of {calibration.seq_len:,} tokens is not between 2 and the "
                f"{longest:,} that the model was trained for: change --seq-len",
                param="seq_len",
            )
        windows = calibration_windows(calibration, tokenizer)
    return PreparedQuantization(
        source, tokenizer, recipe, windows, _output_dtype(source), torch.device(device)
    )


def require_unquantized(folder: Path) -> None:
    """InvalidRequest: the folder's weights are rounded already."""
    quantization = read_json(folder / "config.json").get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "some method")
        raise InvalidRequest(
            f"{folder.resolve().name} is quantized already ({method}): give the original model",
            param="model",
        )


def check_finite_and_checksum(
    source: LayerwiseCheckpoint, on_progress: Callable[[int], None]
) -> int:
    """Read everything once; a checksum of it. on_progress: bytes so far. LoadFailed: a weight is
    not a finite number."""
    total = 0
    for done, checksum in iter_checked_chunks(source):
        on_progress(done)
        total = checksum
    return total


def _output_dtype(source: LayerwiseCheckpoint) -> torch.dtype:
    """The model's own; of a float32 one the sixteen bits that its embedding fits."""
    own = source.dtype
    if own is not torch.float32:
        return own
    pieces = source.iter_chunks("model.embed_tokens.weight")
    most = max(float(piece.abs().max()) for piece in pieces)
    return torch.float16 if most < _FLOAT16_MAX else torch.bfloat16


def _check_packing(source: LayerwiseCheckpoint, recipe: Recipe) -> None:
    every = packing_multiple(recipe)
    for name, (outs, ins) in linear_shapes(source.spec).items():
        if outs % every or ins % every:
            raise InvalidRequest(
                f"{name} of {ins:,} inputs and {outs:,} outputs cannot be packed in "
                f"{recipe.bits} bits, {every} of which fill whole words: use --fp8",
                param="bits",
            )


def check_group_size(spec: ModelSpec, recipe: Recipe) -> None:
    """InvalidRequest: a linear's inputs do not divide into the recipe's groups."""
    size = recipe.group_size
    if not recipe.has_groups or size is None:
        return
    for name, (_, ins) in linear_shapes(spec).items():
        if ins % size:
            fitting = [str(g) for g in (256, 128, 64, 32, 16, 8) if not _is_indivisible(spec, g)]
            remedy = f"--group-size {' or '.join(fitting)}" if fitting else "another method"
            raise InvalidRequest(
                f"{name} has {ins} inputs, which groups of {size} do not divide: use {remedy}",
                param="group_size",
            )


def _is_indivisible(spec: ModelSpec, size: int) -> bool:
    return any(ins % size for _, ins in linear_shapes(spec).values())
