"""What a quantization tells while it goes on, as values and as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from localgen.quant.report import Row

Unit = Literal["bytes", "layers", "tensors", "steps"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run, or a part of it, will take. what: is done to the weights.

    output_bytes: of the result; None: what is made is no result yet. memory_bytes: of the whole
    process, on the host; None: it is not known. states_bytes: activations, part of disk_bytes.
    """

    model: str
    what: str
    out: str
    source_bytes: int
    output_bytes: int | None
    states_bytes: int
    memory_bytes: int | None
    free_bytes: int
    disk_bytes: int
    disk_free_bytes: int


def both(first: Needs | None, second: Needs) -> Needs:
    """What two parts of one run take, one after the other."""
    if first is None:
        return second
    known = [part for part in (first, second) if part.output_bytes is not None] or [second]
    memory = [part.memory_bytes for part in (first, second) if part.memory_bytes is not None]
    return replace(
        known[0],
        states_bytes=max(first.states_bytes, second.states_bytes),
        memory_bytes=max(memory, default=None),
        disk_bytes=max(first.disk_bytes, second.disk_bytes),
    )


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that lies at the place of the result and can be gone on with: layers of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Advice:
    """One way for one model. option: what to ask `localgen quantize` for. need_bytes: with a
    useful context. place: where the result would run; None: it does not fit."""

    option: str
    size_bytes: int
    need_bytes: int
    place: Literal["GPU", "CPU"] | None
    trade: str


@dataclass(frozen=True, slots=True)
class Advised:
    """Every way, most bits first. best: the option to take; None: none fits."""

    ways: tuple[Advice, ...]
    best: str | None


@dataclass(frozen=True, slots=True)
class At:
    """How far a step is: done of so many. A layer that is being worked on is not done."""

    step: str
    done: int
    total: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a user should know, in a sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class Made:
    """The result is whole. layers and what follows: None where nothing went layer by layer, as
    with GGUF files. resumed: layers that were there. seconds: of this process, for layers only.
    peak_bytes: most that the process has had; estimated_bytes: what was said before."""

    path: str
    layers: int | None = None
    resumed: int = 0
    seconds: float = 0.0
    layer_s: float = 0.0
    peak_bytes: int = 0
    estimated_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The original, then the result; measured if that was asked for."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """It was interrupted; so many layers are done, and stay."""

    done: int
    total: int


Event = Needs | Unfinished | Advised | At | Note | Made | Verdict | Stopped
Tell = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_line(event: Event) -> str:
    """One line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def from_record(record: dict[str, Any]) -> Event:
    """Of what such a line holds."""
    return msgspec.convert(record, _KINDS[record["event"]])
