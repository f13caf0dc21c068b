"""What a form for a quantization holds, what of it applies, and what is asked for by it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from localgen.hub.resolve import BUILT_IN
from localgen.quant.request import request
from localgen.quant.request.gguf_types import TYPES, WRITTEN
from localgen.quant.request.recipe import METHODS, Calibration, Method, widths_of
from localgen.quant.request.request import Asked, HeldOut, usual_out

GGUF = "GGUF"
# what a GGUF file is calibrated for
Weighed = Literal["nothing", "importance", "scales"]
METHOD_NAMES = (*METHODS, GGUF)
BITS = (4, 3, 8)
# a whole row is -1, as on the command line
GROUP_SIZES = (128, 64, 32, -1)
WEIGHED: tuple[Weighed, ...] = ("nothing", "importance", "scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """method: one of METHOD_NAMES. gguf: the type, if it is GGUF. text: a file; empty: what ships
    with localgen. out: empty: the usual place. What does not apply to a method is kept for the
    next one that it does apply to."""

    model: str = BUILT_IN
    method: str = "awq"
    gguf: str = "Q4_K_M"
    weighed: Weighed = "nothing"
    bits: int = 4
    group_size: int = 128
    text: str = ""
    is_measured: bool = True
    out: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.method == GGUF

    @property
    def out_path(self) -> Path:
        """Where the result is to be."""
        asked = self.asked()
        if asked.out is not None:
            return asked.out
        return usual_out(self.model, asked.recipe, asked.gguf)

    def asked(self, *, resume: bool = False) -> Asked:
        """InvalidRequest: a recipe that no format can hold."""
        weighed = self.calibrated_for
        folds = weighed == "scales"
        method = "awq" if self.is_gguf and folds else self.method
        grouped = not why_not(self, "group_size")
        recipe = request.recipe(
            {method: True},
            self.gguf if self.is_gguf else None,
            None if why_not(self, "bits") else self.bits,
            self.group_size if grouped else None,
            None,
            weighed != "nothing",
        )
        return Asked(
            model=self.model,
            recipe=recipe,
            gguf=self.gguf if self.is_gguf else None,
            mode=request.mode_of(self.gguf if self.is_gguf else None, folds=folds),
            calibration=Calibration(path=_path(self.text)),
            out=_path(self.out),
            device=None,
            resume=resume,
            held_out=HeldOut() if self.is_measured else None,
        )

    @property
    def calibrated_for(self) -> Weighed:
        """What a GGUF file is calibrated for in the end: some types cannot do without."""
        if not self.is_gguf or self.gguf in WRITTEN:
            return "nothing"
        return (
            "importance" if self.weighed == "nothing" and needs_importance(self) else self.weighed
        )

    @property
    def goes_by_layers(self) -> bool:
        """Whether a run that was stopped can be gone on with."""
        return not self.is_gguf or self.calibrated_for != "nothing"

    @property
    def is_calibrated(self) -> bool:
        """Whether a text is looked at."""
        if self.is_gguf:
            return self.calibrated_for != "nothing"
        return self.method in ("awq", "gptq", "smoothquant")


def needs_importance(choice: Choice) -> bool:
    """Whether the type is garbage without."""
    return TYPES[choice.gguf].needs_importance


def why_not(choice: Choice, field: str) -> str:
    """Why a field of the choice does not apply, in few words; empty: it does."""
    match field:
        case "gguf" | "weighed" if not choice.is_gguf:
            return "for GGUF files"
        case "weighed" if choice.gguf in WRITTEN:
            return f"{choice.gguf} rounds without"
        case "bits" | "group_size" if choice.is_gguf:
            return "the file's type has them"
        case "bits" if choice.method in ("fp8", "smoothquant"):
            return f"{choice.method} has 8"
        case "group_size" if choice.method in ("fp8", "smoothquant"):
            return f"{choice.method}: a scale a row"
        case "text" if not choice.is_calibrated:
            return "nothing is calibrated"
    return ""


def why_not_value(choice: Choice, field: str, value: object) -> str:
    """Why a value of a field that applies does not do; empty: it does."""
    if field == "weighed" and value == "nothing" and needs_importance(choice):
        return f"{choice.gguf} is garbage without"
    if field == "bits" and not choice.is_gguf:
        method: Method = next(name for name in METHODS if name == choice.method)
        return "" if value in widths_of(method) else f"{method} cannot"
    return ""


def option(choice: Choice) -> str:
    """How advice calls it: the options of `localgen quantize`; empty: there is no advice on it."""
    if choice.is_gguf:
        folded = "--awq " if choice.calibrated_for == "scales" else ""
        return f"{folded}--gguf {choice.gguf}"
    bits = "" if why_not(choice, "bits") or choice.bits == 4 else f" --bits {choice.bits}"
    return f"--{choice.method}{bits}"


def keep(choice: Choice, path: Path) -> None:
    """Remember it where that is possible: a full disk is no reason not to quantize."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(choice)), encoding="utf-8")


def kept(path: Path) -> Choice | None:
    """What was kept; None: nothing that can be read."""
    try:
        found = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Choice)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    known = found.method in METHOD_NAMES and found.gguf in TYPES
    return found if known else None


def placed(choice: Choice) -> Choice:
    """The same with the place of its result spelled out, wherever it is read again."""
    return replace(choice, out=str(choice.out_path.absolute()))


def seen_from_here(choice: Choice) -> Choice:
    """A placed choice without its place, where that is the usual one in this folder."""
    usual = replace(choice, out="")
    return usual if choice.out == str(usual.out_path.absolute()) else choice


def is_unfinished(choice: Choice) -> bool:
    """Whether a run of it lies there that did not come to its end."""
    out = choice.out_path
    return (out.parent / f"{out.name}.partial" / "plan.json").is_file()


def _path(text: str) -> Path | None:
    return Path(text.strip()).expanduser() if text.strip() else None
