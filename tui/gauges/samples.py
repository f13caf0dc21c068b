"""What the gauges draw. All frozen: a gauge whose sample is the same again need not repaint."""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.machine_stats import MachineStats
from localgen.backends.terminal_text import one_line
from localgen.backends.types import SpeculationStats
from localgen.client.snapshot import LatencyStats, ModelSnapshot, ServerSnapshot

# one value for each sample of the last minutes, oldest first; None: not known
TimeSeries = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSample:
    """Tokens a second over the last two seconds; batch_size: sequences that a step computes."""

    decode_per_s: float | None = None
    prefill_per_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    batch_size: float | None = None
    decode_series: TimeSeries = ()
    prefill_series: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Of the model that is busiest, with what was seen of that one; model: its name, inert."""

    model: str = ""
    ttft: LatencyStats = field(default_factory=LatencyStats)
    itl: LatencyStats = field(default_factory=LatencyStats)
    ttft_series_ms: TimeSeries = ()
    itl_series_ms: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthSample:
    """utilization: of what the memory can give; None: see reason. read_bytes_per_s: bytes."""

    utilization: float | None = None
    read_bytes_per_s: float | None = None
    limit_bytes_per_s: float | None = None
    medium: str = ""
    reason: str = ""
    utilization_series: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes of one model. kv_*: of its cache, used by requests, kept as prefixes, free."""

    name: str
    state: str
    progress: float
    weights_bytes: int | None
    kv_bytes: int | None
    kv_used: float | None
    kv_cached: float | None
    kv_free: float | None
    kv_tokens: int | None
    rss_bytes: int | None
    gpu_bytes: int | None
    unload_in_s: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """models: None before the server has said anything. server_bytes: of its own process."""

    models: tuple[ModelMemory, ...] | None = None
    machine: MachineStats | None = None
    server_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSample:
    """Speculation of the busiest model; acceptance_rate: of the drafts of the last seconds.

    prefix_hit_rate: share of prompt tokens that the cache had, in the last seconds.
    """

    stats: SpeculationStats | None = None
    acceptance_rate: float | None = None
    prefix_hit_rate: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """Everything at one moment."""

    snapshot: ServerSnapshot = field(default_factory=lambda: ServerSnapshot(server_type=""))
    throughput: ThroughputSample = ThroughputSample()
    latency: LatencySample = LatencySample()
    bandwidth: BandwidthSample = BandwidthSample()
    memory: MemorySample = MemorySample()
    speculation: SpeculationSample = SpeculationSample()


def model_memory(model: ModelSnapshot) -> ModelMemory:
    """The cache in bytes where its size is known, by the share that each kind of tokens takes."""
    per_token = model.kv_bytes / model.kv_tokens if model.kv_bytes and model.kv_tokens else None

    def in_bytes(tokens: int | None) -> float | None:
        return None if tokens is None or per_token is None else tokens * per_token

    return ModelMemory(
        name=one_line(model.name),
        state=model.state,
        # as drawn: what changes less is no reason to repaint
        progress=round(model.progress, 2),
        weights_bytes=model.weights_bytes,
        kv_bytes=model.kv_bytes,
        kv_used=in_bytes(model.kv_used) if model.kv_tokens else model.kv_usage,
        kv_cached=in_bytes(model.kv_cached),
        kv_free=in_bytes(model.kv_free),
        kv_tokens=model.kv_tokens,
        rss_bytes=model.rss_bytes,
        gpu_bytes=model.gpu_bytes,
        unload_in_s=None if model.until_s is None else round(model.until_s),
    )
