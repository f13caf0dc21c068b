"""Which way to make a model smaller suits this machine: what fits, where it runs, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.formats.hf.config_shape import config_shape
from localgen.backends.formats.hf.folder import Checkpoint, read_json
from localgen.hub.quant_choice import Place, Room
from localgen.placement.footprint import Runner, footprint, kept_bytes
from localgen.quant.events import Advice

# bits of a weight in the linears, scales and zeros among them
_GROUPS_OF_128 = {4: 4.16, 3: 3.15, 8: 8.19}


@dataclass(frozen=True, slots=True)
class Way:
    """option: what to ask `localgen quantize` for. bits: of a weight in the linears. rank: of what
    usually loses least, at so many bits; folder: whether it runs on localgen's own engine, else on
    llama.cpp."""

    option: str
    bits: float
    folder: bool
    trade: str


_WAYS = (
    Way("--fp8", 8.0, True, "hardly any loss; no calibration"),
    Way("--gguf Q8_0", 8.5, False, "hardly any loss; no calibration"),
    Way("--gguf Q6_K", 6.56, False, "little loss; no calibration"),
    Way("--gguf Q5_K_M", 5.7, False, "little loss; an importance matrix helps"),
    Way("--gptq", _GROUPS_OF_128[4], True, "small loss; takes calibration"),
    Way("--awq", _GROUPS_OF_128[4], True, "small loss; takes calibration, read by most engines"),
    Way("--awq --gguf Q4_K_M", 4.85, False, "small loss; takes calibration"),
    Way("--rtn", _GROUPS_OF_128[4], True, "more loss than --awq; done in a minute or two"),
    Way("--gptq --bits 3", _GROUPS_OF_128[3], True, "clear loss; widened to 16 bits when it runs"),
    Way("--awq --gguf Q3_K_M", 3.9, False, "clear loss; takes calibration"),
)


def advice(folder: Path, room: Room) -> list[Advice]:
    """Every way, most bits first. LoadFailed: the folder is no model that can be read."""
    shape = config_shape(read_json(folder / "config.json"))
    if shape is None:
        raise LoadFailed(f"{folder}/config.json does not say how large the model is")
    linear, other = _weights(folder)
    return sorted(_all(shape, linear, other, room), key=lambda one: -one.size_bytes)


def recommended(found: list[Advice]) -> Advice | None:
    """The one to take: on the GPU before the CPU, then what loses least; None: none fits."""
    fitting = [one for one in found if one.place is not None]
    order = [way.option for way in _WAYS]
    return min(fitting, key=lambda one: (one.place != "GPU", order.index(one.option)), default=None)


def _all(shape: ModelShape, linear: int, other: int, room: Room) -> Iterator[Advice]:
    for way in _WAYS:
        size = round(linear * way.bits / 8) + 2 * other
        need, place = _place(way, shape, size, 2 * (linear + other), room)
        yield Advice(way.option, size, need, place, way.trade)


def _place(
    way: Way, shape: ModelShape, size: int, plain: int, room: Room
) -> tuple[int, Place | None]:
    """What it needs where it would run best, and where that is."""
    runner: Runner = "cuda" if way.folder else "llamacpp"
    kept = plain if "--bits 3" in way.option else size
    kept = kept_bytes(kept, None, runner, is_gguf=not way.folder)
    need = footprint(kept, shape, runner).need_bytes()
    on_gpu = room.folders if way.folder else room.own_bits
    if on_gpu and need <= room.gpu:
        return need, "GPU"
    return need, "CPU" if not way.folder and need <= room.ram else None


def _weights(folder: Path) -> tuple[int, int]:
    """Weights in the linears of the layers, and in all the rest."""
    checkpoint = Checkpoint(folder)
    linear = other = 0
    for name in checkpoint.names():
        count, sizes = 1, checkpoint.shape(name)
        for size in sizes:
            count *= size
        inside = ".layers." in name and len(sizes) > 1
        linear, other = (linear + count, other) if inside else (linear, other + count)
    return linear, other
