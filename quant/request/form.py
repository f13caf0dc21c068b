"""What a form for a quantization holds, what of it applies, and what is asked for by it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from localgen.hub.resolve import BUILT_IN_MODEL
from localgen.quant.request import request
from localgen.quant.request.gguf_types import DIRECT_TYPES, GGUF_TYPES
from localgen.quant.request.recipe import METHODS, CalibrationConfig, QuantizeMethod, supported_bits
from localgen.quant.request.request import EvalSet, QuantizeRequest, default_output

GGUF = "GGUF"
# what a GGUF file is calibrated for
GgufCalibration = Literal["nothing", "importance", "scales"]
METHOD_CHOICES = (*METHODS, GGUF)
BITS = (4, 3, 8)
# a whole row is -1, as on the command line
GROUP_SIZES = (128, 64, 32, -1)
GGUF_CALIBRATIONS: tuple[GgufCalibration, ...] = ("nothing", "importance", "scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeForm:
    """method: one of METHOD_CHOICES. gguf: the type, if it is GGUF. text: a file; empty: what ships
    with localgen. out: empty: the usual place. What does not apply to a method is kept for the
    next one that it does apply to."""

    model: str = BUILT_IN_MODEL
    method: str = "awq"
    gguf: str = "Q4_K_M"
    weighed: GgufCalibration = "nothing"
    bits: int = 4
    group_size: int = 128
    text: str = ""
    is_measured: bool = True
    out: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.method == GGUF

    @property
    def output_path(self) -> Path:
        """Where the result is to be."""
        asked = self.to_request()
        if asked.output is not None:
            return asked.output
        return default_output(self.model, asked.recipe, asked.gguf)

    def to_request(self, *, resume: bool = False) -> QuantizeRequest:
        """InvalidRequest: a recipe that no format can hold."""
        weighed = self.effective_calibration
        folds = weighed == "scales"
        method = "awq" if self.is_gguf and folds else self.method
        grouped = not unavailable_reason(self, "group_size")
        recipe = request.recipe_from_flags(
            {method: True},
            self.gguf if self.is_gguf else None,
            None if unavailable_reason(self, "bits") else self.bits,
            self.group_size if grouped else None,
            None,
            weighed != "nothing",
        )
        return QuantizeRequest(
            model=self.model,
            recipe=recipe,
            gguf=self.gguf if self.is_gguf else None,
            mode=request.job_mode(self.gguf if self.is_gguf else None, fold_scales=folds),
            calibration=CalibrationConfig(path=_path(self.text)),
            output=_path(self.out),
            device=None,
            resume=resume,
            eval_set=EvalSet() if self.is_measured else None,
        )

    @property
    def effective_calibration(self) -> GgufCalibration:
        """What a GGUF file is calibrated for in the end: some types cannot do without."""
        if not self.is_gguf or self.gguf in DIRECT_TYPES:
            return "nothing"
        return "importance" if self.weighed == "nothing" and needs_imatrix(self) else self.weighed

    @property
    def is_resumable(self) -> bool:
        """Whether a run that was stopped can be gone on with."""
        return not self.is_gguf or self.effective_calibration != "nothing"

    @property
    def needs_calibration(self) -> bool:
        """Whether a text is looked at."""
        if self.is_gguf:
            return self.effective_calibration != "nothing"
        return self.method in ("awq", "gptq", "smoothquant")


def needs_imatrix(form: QuantizeForm) -> bool:
    """Whether the type is garbage without."""
    return GGUF_TYPES[form.gguf].needs_imatrix


def unavailable_reason(form: QuantizeForm, field: str) -> str:
    """Why a field of the choice does not apply, in few words; empty: it does."""
    match field:
        case "gguf" | "weighed" if not form.is_gguf:
            return "for GGUF files"
        case "weighed" if form.gguf in DIRECT_TYPES:
            return f"{form.gguf} rounds without"
        case "bits" | "group_size" if form.is_gguf:
            return "the file's type has them"
        case "bits" if form.method in ("fp8", "smoothquant"):
            return f"{form.method} has 8"
        case "group_size" if form.method in ("fp8", "smoothquant"):
            return f"{form.method}: a scale a row"
        case "text" if not form.needs_calibration:
            return "nothing is calibrated"
    return ""


def invalid_value_reason(form: QuantizeForm, field: str, value: object) -> str:
    """Why a value of a field that applies does not do; empty: it does."""
    if field == "weighed" and value == "nothing" and needs_imatrix(form):
        return f"{form.gguf} is garbage without"
    if field == "bits" and not form.is_gguf:
        method: QuantizeMethod = next(name for name in METHODS if name == form.method)
        return "" if value in supported_bits(method) else f"{method} cannot"
    return ""


def method_option(form: QuantizeForm) -> str:
    """How advice calls it: the options of `localgen quantize`; empty: there is no advice on it."""
    if form.is_gguf:
        folded = "--awq " if form.effective_calibration == "scales" else ""
        return f"{folded}--gguf {form.gguf}"
    bits = "" if unavailable_reason(form, "bits") or form.bits == 4 else f" --bits {form.bits}"
    return f"--{form.method}{bits}"


def save_form(form: QuantizeForm, path: Path) -> None:
    """Remember it where that is possible: a full disk is no reason not to quantize."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(form)), encoding="utf-8")


def load_form(path: Path) -> QuantizeForm | None:
    """What was kept; None: nothing that can be read."""
    try:
        found = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), QuantizeForm)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    known = found.method in METHOD_CHOICES and found.gguf in GGUF_TYPES
    return found if known else None


def with_absolute_output(form: QuantizeForm) -> QuantizeForm:
    """The same with the place of its result spelled out, wherever it is read again."""
    return replace(form, out=str(form.output_path.absolute()))


def with_relative_output(form: QuantizeForm) -> QuantizeForm:
    """A placed choice without its place, where that is the usual one in this folder."""
    usual = replace(form, out="")
    return usual if form.out == str(usual.output_path.absolute()) else form


def has_unfinished_run(form: QuantizeForm) -> bool:
    """Whether a run of it lies there that did not come to its end."""
    out = form.output_path
    return (out.parent / f"{out.name}.partial" / "plan.json").is_file()


def _path(text: str) -> Path | None:
    return Path(text.strip()).expanduser() if text.strip() else None
