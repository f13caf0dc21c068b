"""From what was said of a method to the recipe that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from localgen.backends.errors import InvalidRequest
from localgen.hub.resolve import is_path
from localgen.quant.request.recipe import (
    METHODS,
    CalibrationConfig,
    LayerMode,
    Recipe,
    default_bits,
)

# what the search for scales rounds with in place of a GGUF file's type: its groups are of 32 or
# less
GGUF_CALIBRATION_RECIPE = Recipe(method="awq", bits=4, group_size=32)


@dataclass(frozen=True, slots=True)
class EvalSet:
    """What to measure on. path: None: the text that ships with localgen."""

    path: Path | None = None
    samples: int = 16
    seq_len: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """One run. recipe: None: a GGUF file without calibration. mode: what the streamed job does.
    eval_set: None: nothing is measured."""

    model: str | None
    recipe: Recipe | None
    gguf: str | None
    mode: LayerMode
    calibration: CalibrationConfig
    output: Path | None
    device: str | None
    resume: bool
    eval_set: EvalSet | None


def encode_request(request: QuantizeRequest) -> bytes:
    """For another process, in one line."""
    return msgspec.json.encode(request, enc_hook=str)


def decode_request(line: bytes) -> QuantizeRequest:
    """InvalidRequest: a recipe that no format can hold."""
    return msgspec.json.decode(line, type=QuantizeRequest, dec_hook=lambda kind, value: kind(value))


def default_output(model: str, recipe: Recipe | None, gguf: str | None) -> Path:
    """Where the result is written if nothing is said, in the folder that one is in.

    model: a name or a path. gguf: a type of GGUF files, if the result is one.
    """
    if is_path(model):
        base = Path(model).expanduser().resolve().name
    else:
        base = model.rpartition("/")[2].removesuffix(":safetensors").replace(":", "-")
    if gguf is not None:
        return Path(f"{base}-{gguf}.gguf")
    assert recipe is not None
    bits = f"-{recipe.bits}bit" if recipe.has_groups else ""
    return Path(f"{base}-{recipe.method}{bits}")


def recipe_from_flags(
    flags: Mapping[str, bool],
    gguf: str | None,
    bits: int | None,
    group_size: int | None,
    act_order: bool | None,
    calibrated: bool,
) -> Recipe | None:
    """The method that was asked for; None: a GGUF file without calibration. InvalidRequest: none,
    or several that exclude each other."""
    chosen = [method for method in METHODS if flags.get(method)]
    if not chosen and gguf is None:
        raise InvalidRequest("say how: --awq, --gptq, --rtn, --fp8, --smoothquant or --gguf TYPE")
    if len(chosen) > 1:
        raise InvalidRequest(f"--{chosen[0]} and --{chosen[1]} exclude each other")
    if act_order is not None and chosen != ["gptq"]:
        raise InvalidRequest("--act-order and --no-act-order go with --gptq")
    if group_size is not None and (gguf is not None or chosen[0] in ("fp8", "smoothquant")):
        raise InvalidRequest("--group-size goes with --awq, --gptq and --rtn")
    if gguf is not None and bits is not None:
        raise InvalidRequest("--bits: a GGUF file's are in its type, such as --gguf Q4_K_M")
    if not chosen and not calibrated:
        return None
    if gguf is not None and chosen not in ([], ["awq"]):
        raise InvalidRequest(f"--{chosen[0]} and --gguf exclude each other; --awq goes with it")
    if gguf is not None:
        return GGUF_CALIBRATION_RECIPE
    return Recipe(
        method=chosen[0],
        bits=default_bits(chosen[0]) if bits is None else bits,
        group_size=128 if group_size is None else group_size if group_size > 0 else None,
        desc_act=act_order is not False,
    )


def job_mode(gguf: str | None, *, fold_scales: bool) -> LayerMode:
    """What is done to each layer. fold_scales: awq's scales are to be folded in."""
    return "round" if gguf is None else "fold" if fold_scales else "observe"
