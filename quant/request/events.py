"""Events of a quantization run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from localgen.machine.decode_rates import DecodeRates
from localgen.quant.request.losses import DomainLoss, Interval, KlDifference

# exit status of the quantization process after SIGINT, as in shells
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class EstimateEvent:
    """Resources that a run, or one part of it, will take. description: of the work.

    output_bytes: of the result; None if this part writes none. memory_bytes: peak of the process
    on the host; None if unknown. states_bytes: activations on disk, part of disk_bytes.
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
    """Estimate of two parts of a run that follow each other."""
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
    """An unfinished run at the output path that can be resumed, with its finished layers."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class MethodEstimate:
    """One method for one model. option: arguments of `localgen quantize`.

    rates: of the result on the CPU; None if it would run elsewhere, or if they were not measured.

    need_bytes: memory to run the result with a useful context. place: where it would run; None if
    it does not fit.
    """

    option: str
    size_bytes: int
    need_bytes: int
    place: Literal["GPU", "CPU"] | None
    trade: str
    rates: DecodeRates | None = None


@dataclass(frozen=True, slots=True)
class RecommendationEvent:
    """All methods, largest result first. best_option: the recommended one; None if none fits."""

    estimates: tuple[MethodEstimate, ...]
    best_option: str | None


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Progress of a step. A layer counts when it is finished.

    current: fraction of the unit in progress, by its steps, not by time; 0 if unknown.
    """

    step: str
    done: int
    total: int
    unit: Literal["bytes", "layers", "tensors", "steps"]
    current: float = 0.0

    @property
    def completed(self) -> float:
        """Units that are done, with the fraction of the one in progress."""
        return self.done + self.current


@dataclass(frozen=True, slots=True)
class LayersEstimateEvent:
    """Seconds that all layers that are left will take. step: as in their ProgressEvents."""

    step: str
    layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """A notice for the user, one sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The result is complete. layers: None for GGUF files, as all fields after it.

    resumed: layers taken from an earlier run. seconds: of this process, for layers only;
    estimated_s: as in LayersEstimateEvent, None if there was none. peak_bytes: peak memory of the
    process; estimated_bytes: its estimate before the run.
    """

    path: str
    layers: int | None = None
    resumed: int = 0
    seconds: float = 0.0
    estimated_s: float | None = None
    layer_s: float = 0.0
    peak_bytes: int = 0
    estimated_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EvalRow:
    """Evaluation of one model. perplexity, kl, tokens_per_s: None if not measured.

    kl: Kullback-Leibler divergence from the first row's model, in nats. perplexity_change: relative
    to the first row's, 0.01 for 1 %. Intervals are None where there is no kl, or too few windows.
    domains: the same by domain of the text. bits_per_weight: of all tensors in the files.
    """

    name: str
    path: str
    size_bytes: int
    bits_per_weight: float
    perplexity: float | None = None
    kl: float | None = None
    tokens_per_s: float | None = None
    kl_interval: Interval | None = None
    perplexity_change: Interval | None = None
    domains: tuple[DomainLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalEvent:
    """Evaluation of the original and of the results, in this order.

    windows: evaluated sequences; 0 if there was no evaluation. differences: of each pair of results
    with a KL.
    """

    rows: tuple[EvalRow, ...]
    windows: int = 0
    differences: tuple[KlDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class StoppedEvent:
    """The run was interrupted; what is finished is kept. unit: of done and total."""

    done: int
    total: int
    unit: str = "layers"

    @property
    def can_resume(self) -> bool:
        """Something is finished. Groups of tensors are measured after all layers."""
        return self.done > 0 or self.unit != "layers"


@dataclass(frozen=True, slots=True)
class MixtureEvent:
    """Types of the tensors of a GGUF file that were chosen by loss.

    target: in words. predicted_kl: KL divergence from the original on the calibration text, in
    nats. by_gptq: GPTQ has chosen the codes since that prediction. types: by role, of all layers in
    order, or one outside of layers. probes_s: seconds that the measurement of the groups took in
    this process; estimated_s: of all groups, said before. peak_bytes, estimated_bytes: as in
    FinishedEvent.
    """

    target: str
    size_bytes: int
    predicted_kl: float
    by_gptq: bool
    types: dict[str, list[str]]
    probes_s: float
    estimated_s: float
    peak_bytes: int
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The last event of a process that failed. code: as in LocalgenError."""

    message: str
    code: str


QuantizeEvent = (
    EstimateEvent
    | UnfinishedEvent
    | RecommendationEvent
    | ProgressEvent
    | LayersEstimateEvent
    | NoteEvent
    | FinishedEvent
    | MixtureEvent
    | EvalEvent
    | StoppedEvent
)
OnEvent = Callable[[QuantizeEvent], None]
