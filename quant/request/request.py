"""The quantization request, built from options, and the messages of a quantization process.

Its parent sends one QuantizeRequest; it sends events, a FailedEvent last if it fails.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from localgen.backends.errors import InvalidRequest
from localgen.backends.messages import MessageCodec
from localgen.hub.resolve import is_path
from localgen.quant.request.events import FailedEvent, QuantizeEvent
from localgen.quant.request.gguf_types import AUTO, resolve_gguf_type
from localgen.quant.request.recipe import (
    LEARNING_METHODS,
    CalibrationConfig,
    LayerMode,
    QuantizeMethod,
    Recipe,
    default_bits,
    default_rounding_steps,
)
from localgen.quant.request.target import GgufTarget

# the scale search of a calibrated GGUF file rounds with this recipe in place of the file's type,
# whose groups have 32 weights or fewer
_WHOLE_ROW = -1  # as a group size
GGUF_CALIBRATION_RECIPE = Recipe(method="awq", bits=4, group_size=32)


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Text to evaluate on. path: None for localgen's held-out text."""

    path: Path | None = None
    samples: int = 36
    seq_len: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """One run. recipe: None for a GGUF file without calibration. target: of a GGUF file whose types
    are chosen by measured loss. mode: what the layer-by-layer job does. output: None for the
    default path. eval_set: None to skip the evaluation."""

    model: str | None
    recipe: Recipe | None = None
    gguf: str | None = None
    target: GgufTarget | None = None
    mode: LayerMode = "round"
    calibration: CalibrationConfig
    output: Path | None
    device: str | None = None
    resume: bool
    eval_set: EvalSet | None

    @property
    def file_type(self) -> str | None:
        """Of a GGUF file, as in the default name of the result; None for a folder.

        Raises InvalidRequest for an unknown type.
        """
        if self.gguf is None:
            return None
        method = {"fold": "awq-", "gguf": "gptq-"}.get(self.mode, "")
        if self.target is not None:
            return f"{method}{AUTO}-{self.target.label}"
        return method + resolve_gguf_type(self.gguf)

    def with_method(
        self,
        methods: Sequence[QuantizeMethod],
        *,
        bits: int | None = None,
        group_size: int | None = None,
        act_order: bool | None = None,
        rounding_steps: int | None = None,
        calibrate: bool,
    ) -> QuantizeRequest:
        """Copy with the recipe and mode that the options mean, or None for the method's default.

        group_size: -1 for a whole row. calibrate: calibration was requested explicitly.
        Raises InvalidRequest for no method, or options that exclude each other.
        """
        _check_options(methods, self.gguf, bits, group_size, act_order)
        if rounding_steps is not None:
            _check_learning(methods, self.gguf)
        if self.target is not None:
            _check_target(methods, self.target, is_measured=self.eval_set is not None)
        if self.gguf is not None and list(methods) == ["gptq"]:
            by_type = Recipe(
                method="gptq",
                group_size=None,
                desc_act=act_order is not False,
                rounding_steps=rounding_steps or 0,
            )
            return replace(self, recipe=by_type, mode="gguf")
        if self.gguf is not None:
            is_calibrated = methods or calibrate or self.target is not None
            recipe = GGUF_CALIBRATION_RECIPE if is_calibrated else None
            return replace(self, recipe=recipe, mode="fold" if methods else "observe")
        bits = default_bits(methods[0]) if bits is None else bits
        if rounding_steps is None:
            rounding_steps = default_rounding_steps(methods[0], bits)
        recipe = Recipe(
            method=methods[0],
            bits=bits,
            group_size=None if group_size == _WHOLE_ROW else group_size or 128,
            desc_act=act_order is not False,
            rounding_steps=rounding_steps,
        )
        if calibrate and not recipe.needs_calibration:
            raise InvalidRequest("--calib: --rtn and --fp8 use no calibration text")
        return replace(self, recipe=recipe)


def _check_options(
    methods: Sequence[QuantizeMethod],
    gguf: str | None,
    bits: int | None,
    group_size: int | None,
    act_order: bool | None,
) -> None:
    if not methods and gguf is None:
        raise InvalidRequest(
            "choose a method: --awq, --gptq, --rtn, --fp8, --smoothquant or --gguf TYPE"
        )
    if len(methods) > 1:
        raise InvalidRequest(f"--{methods[0]} and --{methods[1]} exclude each other")
    if act_order is not None and list(methods) != ["gptq"]:
        raise InvalidRequest("--act-order and --no-act-order go with --gptq")
    if group_size is not None and (gguf is not None or methods[0] in ("fp8", "smoothquant")):
        raise InvalidRequest("--group-size goes with --awq, --gptq and --rtn, without --gguf")
    if group_size is not None and group_size < 1 and group_size != _WHOLE_ROW:
        raise InvalidRequest(
            f"--group-size: a group has 8 inputs or more, and -1 is a whole row; not {group_size}",
            param="group_size",
        )
    if gguf is not None and bits is not None:
        raise InvalidRequest("--bits and --gguf exclude each other: the file type sets the bits")
    if gguf is not None and list(methods) not in ([], ["awq"], ["gptq"]):
        raise InvalidRequest(
            f"--{methods[0]} and --gguf exclude each other; --awq and --gptq go with it"
        )


def _check_learning(methods: Sequence[QuantizeMethod], gguf: str | None) -> None:
    if gguf is not None and list(methods) != ["gptq"]:
        raise InvalidRequest(
            "--rounding-steps goes with --gguf only if --gptq is given too", param="rounding_steps"
        )
    if gguf is None and methods[0] not in LEARNING_METHODS:
        known = " and ".join(f"--{name}" for name in LEARNING_METHODS)
        raise InvalidRequest(f"--rounding-steps goes with {known}", param="rounding_steps")


def _check_target(
    methods: Sequence[QuantizeMethod], target: GgufTarget, *, is_measured: bool
) -> None:
    if list(methods) not in ([], ["gptq"]):
        raise InvalidRequest(
            f"--{methods[0]} and --gguf {AUTO} exclude each other; --gptq goes with it"
        )
    if target.kl is not None and not is_measured:
        raise InvalidRequest(
            "--target-kl is checked by the evaluation: leave out --no-eval", param="target-kl"
        )


EVENT_CODEC: MessageCodec[QuantizeEvent | FailedEvent] = MessageCodec(
    get_args(QuantizeEvent | FailedEvent)
)
# decoding raises InvalidRequest for a recipe that no format can hold
REQUEST_CODEC = MessageCodec((QuantizeRequest,))


def default_output(model: str, recipe: Recipe | None, gguf: str | None) -> Path:
    """Default path of the result, in the current folder.

    model: a name or a path. gguf: the type of a GGUF file; None for a folder.
    """
    if is_path(model):
        base = Path(os.path.expanduser(model)).resolve().name
    else:
        base = model.rpartition("/")[2].removesuffix(":safetensors").replace(":", "-")
    if gguf is not None:
        return Path(f"{base}-{gguf}.gguf")
    assert recipe is not None
    bits = f"-{recipe.bits}bit" if recipe.has_groups else ""
    return Path(f"{base}-{recipe.method}{bits}")
