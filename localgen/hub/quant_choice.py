"""Which quantization of a model is the best that this machine can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localgen.backends.errors import OutOfMemory
from localgen.backends.units import as_gb
from localgen.config import Settings
from localgen.hub.catalog import Entry
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, this_machine
from localgen.placement.footprint import footprint, kept_bytes, useful_tokens

# more bits than this take twice the memory traffic for a difference that is hard to measure
_WIDE = ("F16", "BF16", "F32")

_FOUR_BITS = ("awq-int4", "gptq-int4", "w4a16", "mxfp4")

Place = Literal["GPU", "CPU"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to have a model. quant: what selects it; size_bytes: of its weights."""

    quant: str
    size_bytes: int
    is_gguf: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that models may use, in bytes. own_bits: a GPU that computes with a GGUF file as it
    is, rather than widened to 16 bits."""

    ram: int
    gpu: int = 0
    own_bits: bool = False
    folders: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """What an alternative needs, and where it would run; None: nowhere here."""

    alternative: Alternative
    need_bytes: int
    place: Place | None


def room_here(hardware: Hardware | None = None) -> Room:
    """Memory of this machine that is free now, within LOCALGEN_MEMORY_LIMIT."""
    there = hardware or this_machine()
    ram = free_memory.free_bytes(Settings.from_environment().memory_limit, (), ())
    usable = there.why_no_cuda is None
    own_bits = bool(there.gpus) and there.llamacpp_on_gpu()
    gpu = max((gpu.free_bytes for gpu in there.gpus), default=0) if usable or own_bits else 0
    return Room(ram, gpu, own_bits, usable)


def fits(alternatives: Sequence[Alternative], room: Room, entry: Entry | None) -> list[Fit]:
    """What each needs with a useful context, and where it goes, largest first."""
    ordered = sorted(alternatives, key=lambda one: -one.size_bytes)
    return [_fit(alternative, room, entry) for alternative in ordered]


def best(found: Sequence[Fit]) -> Fit | None:
    """The one to take: on the GPU before the CPU, then the largest of at most 8 bits a weight."""
    able = [fit for fit in found if fit.place]
    return min(able, key=_rank, default=None)


def folder_alternatives(entry: Entry | None, room: Room) -> list[Alternative]:
    """What the catalog knows in Hugging Face's format, where something here runs that; sizes from
    the bits of a weight where they are not known."""
    if entry is None or not room.folders:
        return []
    ways = []
    for folder in entry.folders:
        guessed = (entry.params or 0) * _bytes_a_weight(folder.method)
        size_bytes = folder.size_bytes or round(guessed)
        if size_bytes:
            ways.append(Alternative(folder.method, size_bytes, is_gguf=False))
    return ways


def choose(
    alternatives: Sequence[Alternative], name: str, entry: Entry | None, room: Room
) -> tuple[Fit, str]:
    """The best for this machine, and why. OutOfMemory: none fits."""
    found = fits(alternatives, room, entry)
    chosen = best(found)
    if chosen is None:
        least = found[-1]
        raise OutOfMemory(
            f"nothing of {name} fits: the smallest, {least.alternative.quant}, needs "
            f"{as_gb(least.need_bytes)} with a context of {_useful(entry):,}, "
            f"{as_gb(max(room.ram, room.gpu))} are free"
        )
    return chosen, reason(chosen, found, room, entry)


def reason(chosen: Fit, found: Sequence[Fit], room: Room, entry: Entry | None) -> str:
    """Why this one: what it takes, what there is, and what keeps the next larger one out."""
    there = room.gpu if chosen.place == "GPU" else room.ram
    memory_of = "the GPU" if chosen.place == "GPU" else "memory"
    text = (
        f"{chosen.alternative.quant} needs {as_gb(chosen.need_bytes)} of {memory_of} with a "
        f"context of {_useful(entry):,}, {as_gb(there)} are free"
    )
    larger = [fit for fit in found if fit.need_bytes > chosen.need_bytes]
    if not larger:
        return text
    following = larger[-1]
    if following.place == chosen.place:
        return f"{text}; {following.alternative.quant} fits, but is read twice as long each token"
    if following.place is None:
        return f"{text}; {following.alternative.quant} would need {as_gb(following.need_bytes)}"
    return f"{text}; {following.alternative.quant} would run on the {following.place}"


def _bytes_a_weight(method: str) -> float:
    if method == "safetensors":
        return 2.0
    # four bits, their scales, and the embedding in sixteen
    return 0.65 if method in _FOUR_BITS else 1.1


def _rank(fit: Fit) -> tuple[bool, bool, int]:
    wide = fit.alternative.is_gguf and fit.alternative.quant.upper() in _WIDE
    return fit.place != "GPU", wide, -fit.alternative.size_bytes


def _useful(entry: Entry | None) -> int:
    return useful_tokens(entry.shape if entry else None)


def _fit(alternative: Alternative, room: Room, entry: Entry | None) -> Fit:
    shape = entry.shape if entry else None
    if not alternative.is_gguf:
        need = footprint(alternative.size_bytes, shape, "cuda").need_bytes()
        return Fit(alternative, need, "GPU" if room.folders and need <= room.gpu else None)
    need = on_gpu = footprint(alternative.size_bytes, shape).need_bytes()
    if not room.own_bits:
        params = entry.params if entry else None
        wide = kept_bytes(alternative.size_bytes, params, "cuda", is_gguf=True)
        on_gpu = footprint(wide, shape, "cuda").need_bytes()
    if (room.own_bits or room.folders) and on_gpu <= room.gpu:
        return Fit(alternative, on_gpu, "GPU")
    return Fit(alternative, need, "CPU" if need <= room.ram else None)
