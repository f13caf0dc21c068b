"""QuantizeForm: the values of the quantize screen, and the request that they mean."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from localgen.backends.errors import InvalidRequest
from localgen.backends.typed_data import decode_json
from localgen.config import BUILT_IN_MODEL
from localgen.locked_file import LockedFile
from localgen.quant.request.gguf_types import AUTO, DIRECT_TYPES, GGUF_TYPES, GPTQ_TYPES
from localgen.quant.request.recipe import (
    LEARNING_METHODS,
    METHODS,
    CalibrationConfig,
    QuantizeMethod,
    default_rounding_steps,
    supported_bits,
)
from localgen.quant.request.request import EvalSet, QuantizeRequest, default_output
from localgen.quant.request.target import parse_gguf_choice

GGUF = "GGUF"
# calibration of a GGUF file: none, an importance matrix, with AWQ's scales folded in, codes by GPTQ
GgufCalibration = Literal["nothing", "importance", "scales", "gptq"]
METHOD_CHOICES = (*METHODS, GGUF)
BITS = (4, 3, 2, 8)
# -1: a whole row, as on the command line
GROUP_SIZES = (128, 64, 32, -1)
GGUF_CALIBRATIONS: tuple[GgufCalibration, ...] = ("nothing", "importance", "scales", "gptq")
# that a calibration of a GGUF file stands for
_METHODS: dict[str, QuantizeMethod] = {"scales": "awq", "gptq": "gptq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeForm:
    """method: one of METHOD_CHOICES. gguf: the file type if the method is GGUF, or `auto` with its
    target, as for parse_gguf_choice.

    is_learned: learned rounding, where that is the method's default; else plain. text: path of the
    calibration text; empty for localgen's own. out: output path; empty for the default. Values that
    do not apply to a method are kept for the next method.
    """

    model: str = BUILT_IN_MODEL
    method: str = "awq"
    gguf: str = "Q4_K_M"
    gguf_calibration: GgufCalibration = "nothing"
    bits: int = 4
    group_size: int = 128
    is_learned: bool = True
    text: str = ""
    is_measured: bool = True
    out: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.method == GGUF

    @property
    def is_auto(self) -> bool:
        """The types of a GGUF file are chosen by measured loss."""
        return self.is_gguf and self.gguf.lower().startswith(AUTO)

    @property
    def output_path(self) -> Path:
        """Path of the result."""
        request = self.to_request()
        return request.output or default_output(self.model, request.recipe, request.file_type)

    def to_request(self, *, resume: bool = False) -> QuantizeRequest:
        """Raises InvalidRequest for a recipe that no format can hold, or an unknown file type."""
        gguf, target = parse_gguf_choice(self.gguf) if self.is_gguf else (None, None)
        calibration = self.effective_calibration
        method = _METHODS.get(calibration, self.method)
        request = QuantizeRequest(
            model=self.model,
            gguf=gguf,
            target=target,
            calibration=CalibrationConfig(path=_path(self.text)),
            output=_path(self.out),
            resume=resume,
            eval_set=EvalSet() if self.is_measured else None,
        )
        return request.with_method(
            [name for name in METHODS if name == method],
            bits=None if unavailable_reason(self, "bits") else self.bits,
            group_size=None if unavailable_reason(self, "group_size") else self.group_size,
            rounding_steps=None if self.is_learned or unavailable_reason(self, "is_learned") else 0,
            calibrate=calibration != "nothing",
        )

    @property
    def effective_calibration(self) -> GgufCalibration:
        """Calibration of the GGUF file; types that need an importance matrix always get one."""
        if not self.is_gguf or self.gguf in DIRECT_TYPES:
            return "nothing"
        chosen = self.gguf_calibration
        if self.is_auto:
            return "gptq" if chosen == "gptq" else "importance"
        cannot = chosen == "gptq" and self.gguf not in GPTQ_TYPES
        return "importance" if cannot or (chosen == "nothing" and self.needs_imatrix) else chosen

    @property
    def is_resumable(self) -> bool:
        """A stopped run can be resumed."""
        return not self.is_gguf or self.needs_calibration

    @property
    def needs_calibration(self) -> bool:
        """The run reads a calibration text."""
        if self.is_gguf:
            return self.effective_calibration != "nothing"
        return self.method in ("awq", "gptq", "smoothquant")

    @property
    def needs_imatrix(self) -> bool:
        """The GGUF type is unusable without an importance matrix."""
        return self.is_auto or GGUF_TYPES[self.gguf].needs_imatrix


def unavailable_reason(form: QuantizeForm, field: str) -> str:
    """Short reason why a field does not apply; empty if it does."""
    match field:
        case "gguf" | "gguf_calibration" if not form.is_gguf:
            return "for GGUF files"
        case "gguf_calibration" if form.gguf in DIRECT_TYPES:
            return f"{form.gguf} needs no calibration"
        case "bits" | "group_size" if form.is_gguf:
            return "set by the file type"
        case "bits" if form.method in ("fp8", "smoothquant"):
            return f"{form.method}: always 8"
        case "group_size" if form.method in ("fp8", "smoothquant"):
            return f"{form.method}: one scale per row"
        case "is_learned" if form.method not in LEARNING_METHODS:
            return f"for {' and '.join(LEARNING_METHODS)}"
        case "is_learned" if not default_rounding_steps(_folder_method(form), form.bits):
            return f"{form.method} with {form.bits} bits: plain"
        case "text" if not form.needs_calibration:
            return "no calibration"
    return ""


def invalid_value_reason(form: QuantizeForm, field: str, value: object) -> str:
    """Short reason why a field that applies cannot have this value; empty if it can."""
    if field == "gguf_calibration" and value == "nothing" and form.needs_imatrix:
        return f"{form.gguf} requires an importance matrix"
    if field == "gguf_calibration" and form.is_auto:
        return "auto cannot be combined with AWQ" if value == "scales" else ""
    if field == "gguf_calibration" and value == "gptq" and form.gguf not in GPTQ_TYPES:
        return f"GPTQ cannot choose the codes of {form.gguf}"
    if field == "bits" and not form.is_gguf:
        return "" if value in supported_bits(_folder_method(form)) else f"{form.method} cannot"
    return ""


def _folder_method(form: QuantizeForm) -> QuantizeMethod:
    """The method of a form whose result is a folder, no GGUF file."""
    return next(name for name in METHODS if name == form.method)


def method_option(form: QuantizeForm) -> str:
    """The method as arguments of `localgen quantize`, as in MethodEstimate.option."""
    if form.is_gguf:
        method = _METHODS.get(form.effective_calibration)
        return f"{f'--{method} ' if method else ''}--gguf {form.gguf}"
    bits = "" if unavailable_reason(form, "bits") or form.bits == 4 else f" --bits {form.bits}"
    return f"--{form.method}{bits}"


def with_option(form: QuantizeForm, option: str) -> QuantizeForm:
    """The form with another method, given as method_option returns it."""
    match option.split():
        case ["--awq", "--gguf", gguf]:
            return replace(form, method=GGUF, gguf=gguf, gguf_calibration="scales")
        case ["--gptq", "--gguf", gguf]:
            return replace(form, method=GGUF, gguf=gguf, gguf_calibration="gptq")
        case ["--gguf", gguf]:
            return replace(form, method=GGUF, gguf=gguf, gguf_calibration="nothing")
        case [method, "--bits", bits]:
            return replace(form, method=method.removeprefix("--"), bits=int(bits))
        case [method]:
            return replace(form, method=method.removeprefix("--"), bits=4)
    raise ValueError(option)


def save_form(form: QuantizeForm, path: Path) -> None:
    """Write the form; a failure is ignored, because a full disk must not stop a run."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        LockedFile(path).store(msgspec.json.encode(form))


def load_form(path: Path) -> QuantizeForm | None:
    """Return the saved form, or None if there is none that can be read."""
    try:
        found = decode_json(path.read_bytes(), QuantizeForm)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(InvalidRequest):
        parse_gguf_choice(found.gguf)
        return found if found.method in METHOD_CHOICES else None
    return None


def with_absolute_output(form: QuantizeForm) -> QuantizeForm:
    """Copy whose output path is absolute, to be saved for other folders."""
    return replace(form, out=str(form.output_path.absolute()))


def with_relative_output(form: QuantizeForm) -> QuantizeForm:
    """Copy without its output path if that is the default one in this folder."""
    default = replace(form, out="")
    return default if form.out == str(default.output_path.absolute()) else form


def has_unfinished_run(form: QuantizeForm) -> bool:
    """Return True if the form's output path has an unfinished run."""
    out = form.output_path
    return (out.parent / f"{out.name}.partial" / "plan.json").is_file()


def _path(text: str) -> Path | None:
    return Path(os.path.expanduser(text.strip())) if text.strip() else None
