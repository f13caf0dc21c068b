"""Target of a GGUF file whose types are chosen by measurement: a size, or a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest
from localgen.backends.units import format_size
from localgen.config import BadSetting, parse_size
from localgen.quant.request.gguf_types import AUTO, resolve_gguf_type

DEFAULT_BITS_PER_WEIGHT = 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTarget:
    """One of: size_bytes, most bytes of the file; bits_per_weight, most bits of all tensors,
    embedding and norms included, for each weight; kl, most KL divergence from the original in nats,
    for the smallest file."""

    size_bytes: int | None = None
    bits_per_weight: float | None = None
    kl: float | None = None

    @property
    def label(self) -> str:
        """Short form for a file name."""
        if self.size_bytes is not None:
            return format_size(self.size_bytes).replace(" ", "")
        if self.bits_per_weight is not None:
            return f"{self.bits_per_weight:g}bpw"
        return f"kl{self.kl:g}"

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return f"a file of {format_size(self.size_bytes)}"
        if self.bits_per_weight is not None:
            return f"{self.bits_per_weight:g} bits per weight"
        return f"a KL divergence of {self.kl:g}"


def parse_gguf_target(
    gguf: str | None, size: str | None, bits_per_weight: float | None, kl: float | None
) -> GgufTarget | None:
    """The target that the options mean; None if the file type is not `auto`.

    gguf: the file type. `auto` without a target has DEFAULT_BITS_PER_WEIGHT. Raises InvalidRequest
    for options that exclude each other or are out of range.
    """
    options = {"target-size": size, "target-bpw": bits_per_weight, "target-kl": kl}
    given = [name for name, value in options.items() if value is not None]
    if gguf is None or gguf.lower() != AUTO:
        if given:
            raise InvalidRequest(f"--{given[0]} goes with --gguf auto", param=given[0])
        return None
    if len(given) > 1:
        raise InvalidRequest(f"--{given[0]} and --{given[1]} exclude each other", param=given[1])
    for name, value in (("target-bpw", bits_per_weight), ("target-kl", kl)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidRequest(f"--{name} {value:g}: give a finite number above 0", param=name)
    if size is not None:
        return GgufTarget(size_bytes=_parse_target_size(size))
    if not given:
        bits_per_weight = DEFAULT_BITS_PER_WEIGHT
    return GgufTarget(bits_per_weight=bits_per_weight, kl=kl)


def parse_gguf_choice(text: str) -> tuple[str, GgufTarget | None]:
    """A file type, or `auto` with its target: `auto`, `auto 3.4G`, `auto 4 bits`, `auto KL 0.05`.

    Raises InvalidRequest for an unknown type or target.
    """
    name, *words = text.split() or [""]
    if name.lower() != AUTO:
        return resolve_gguf_type(text.strip()), None
    size: str | None = None
    bits_per_weight: float | None = None
    kl: float | None = None
    try:
        match [word.lower() for word in words]:
            case []:
                pass
            case ["kl", value]:
                kl = float(value)
            case [value, "bits" | "bpw"]:
                bits_per_weight = float(value)
            case [value]:
                size = value
            case _:
                raise ValueError
    except ValueError:
        raise InvalidRequest(
            f"{text}: give auto, auto 3.4G, auto 4 bits or auto KL 0.05", param="gguf"
        ) from None
    return AUTO, parse_gguf_target(AUTO, size, bits_per_weight, kl)


def _parse_target_size(text: str) -> int:
    try:
        return parse_size(text, "--target-size")
    except BadSetting as error:
        raise InvalidRequest(error.message, param="target-size") from None
