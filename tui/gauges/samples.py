"""Samples that the gauges draw. All are frozen, so an equal sample needs no repaint."""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.engine_stats import KVTierStats, SpeculationStats
from localgen.backends.machine_stats import MachineStats
from localgen.backends.terminal_text import escape_name
from localgen.client.snapshot import LatencyStats, ModelSnapshot, ServerSnapshot

# one value per plot point, oldest first; None: unknown
TimeSeries = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSample:
    """Tokens/s while steps were computed, in the last two seconds.

    batch_size: mean number of sequences per step.
    """

    decode_per_s: float | None = None
    prefill_per_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    batch_size: float | None = None
    decode_series: TimeSeries = ()
    prefill_series: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Latency of the busiest model. model: its name, control characters escaped."""

    model: str = ""
    ttft: LatencyStats = field(default_factory=LatencyStats)
    itl: LatencyStats = field(default_factory=LatencyStats)
    ttft_series_ms: TimeSeries = ()
    itl_series_ms: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthSample:
    """Memory bandwidth in use. reason: source of the limit, or why it is unknown."""

    utilization: float | None = None
    read_bytes_per_s: float | None = None
    limit_bytes_per_s: float | None = None
    medium: str = ""
    reason: str = ""
    utilization_series: TimeSeries = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Memory of one model, in bytes.

    kv_used, kv_cached, kv_free: KV cache of running requests, of cached prefixes, and free;
    kv_used is a fraction if the size of the KV cache is unknown.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """models: None until the server has responded. server_bytes: of the server process itself.

    kv_tiers: prefixes outside of the KV cache, all models together.
    """

    models: tuple[ModelMemory, ...] | None = None
    machine: MachineStats | None = None
    server_bytes: int | None = None
    kv_tiers: tuple[KVTierStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSample:
    """Speculation and prefix cache of the busiest model.

    acceptance_rate: accepted fraction of recent draft tokens. prefix_hit_rate: cached fraction of
    recent prompt tokens.
    """

    stats: SpeculationStats | None = None
    acceptance_rate: float | None = None
    prefix_hit_rate: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSample:
    """All gauge samples of one moment."""

    snapshot: ServerSnapshot = field(default_factory=lambda: ServerSnapshot(server_type=""))
    throughput: ThroughputSample = ThroughputSample()
    latency: LatencySample = LatencySample()
    bandwidth: BandwidthSample = BandwidthSample()
    memory: MemorySample = MemorySample()
    speculation: SpeculationSample = SpeculationSample()


def model_memory(model: ModelSnapshot) -> ModelMemory:
    """Convert a model's snapshot; KV cache in bytes where its size in bytes is known."""
    per_token = model.kv_bytes / model.kv_tokens if model.kv_bytes and model.kv_tokens else None

    def in_bytes(tokens: int | None) -> float | None:
        return None if tokens is None or per_token is None else tokens * per_token

    return ModelMemory(
        name=escape_name(model.name),
        state=model.state,
        # rounded as drawn, so that smaller changes cause no repaint
        progress=round(model.progress, 2),
        weights_bytes=model.weights_bytes,
        kv_bytes=model.kv_bytes,
        kv_used=in_bytes(model.kv_used) if model.kv_tokens else model.kv_usage,
        kv_cached=in_bytes(model.kv_cached),
        kv_free=in_bytes(model.kv_free),
        kv_tokens=model.kv_tokens,
        rss_bytes=model.rss_bytes,
        gpu_bytes=model.gpu_bytes,
    )
