"""What a quantization tells while it goes on, as values and as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from localgen.quant.report import EvalRow

ProgressUnit = Literal["bytes", "layers", "tensors", "steps"]


@dataclass(frozen=True, slots=True)
class EstimateEvent:
    """What a run, or a part of it, will take. description: is done to the weights.

    output_bytes: of the result; None: what is made is no result yet. memory_bytes: of the whole
    process, on the host; None: it is not known. states_bytes: activations, part of disk_bytes.
    """

    model: str
    description: str
    output: str
    source_bytes: int
    output_bytes: int | None
    states_bytes: int
    memory_bytes: int | None
    free_bytes: int
    disk_bytes: int
    disk_free_bytes: int


def combine_estimates(first: EstimateEvent | None, second: EstimateEvent) -> EstimateEvent:
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
class UnfinishedEvent:
    """A run that lies at the place of the result and can be gone on with: layers of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class MethodEstimate:
    """One way for one model. option: what to ask `localgen quantize` for. need_bytes: with a
    useful context. place: where the result would run; None: it does not fit."""

    option: str
    size_bytes: int
    need_bytes: int
    place: Literal["GPU", "CPU"] | None
    trade: str


@dataclass(frozen=True, slots=True)
class RecommendationEvent:
    """Every way, most bits first. best_option: the option to take; None: none fits."""

    estimates: tuple[MethodEstimate, ...]
    best_option: str | None


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a step is: done of so many. A layer that is being worked on is not done."""

    step: str
    done: int
    total: int
    unit: ProgressUnit


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """Something that a user should know, in a sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishedEvent:
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
class EvalEvent:
    """The original, then the result; measured if that was asked for."""

    rows: tuple[EvalRow, ...]


@dataclass(frozen=True, slots=True)
class StoppedEvent:
    """It was interrupted; so many layers are done, and stay."""

    done: int
    total: int


QuantizeEvent = (
    EstimateEvent
    | UnfinishedEvent
    | RecommendationEvent
    | ProgressEvent
    | NoteEvent
    | FinishedEvent
    | EvalEvent
    | StoppedEvent
)
OnEvent = Callable[[QuantizeEvent], None]

_EVENT_TYPES: dict[str, type[QuantizeEvent]] = {
    kind.__name__: kind for kind in get_args(QuantizeEvent)
}


def encode_event(event: QuantizeEvent) -> str:
    """One line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode_event(record: dict[str, Any]) -> QuantizeEvent:
    """Of what such a line holds."""
    return msgspec.convert(record, _EVENT_TYPES[record["event"]])
