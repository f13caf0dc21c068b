"""The state of a server at one moment. None: not reported by this server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from localgen.backends.engine_stats import (
    EngineStats,
    KVTierStats,
    SequenceStats,
    SpeculationStats,
)
from localgen.backends.errors import ServerUnavailable
from localgen.backends.machine_stats import EndedRequest, MachineStats, ReadCost
from localgen.backends.model_info import MemoryUsage
from localgen.backends.typed_data import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """Latency: the last value, and percentiles of the last minute."""

    last_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCounters:
    """Counters since the start of the engine.

    busy_s: time of all steps; step_sequences: sum of the sequences of all steps; context_tokens:
    cached tokens attended to.
    """

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    steps: float | None = None
    busy_s: float | None = None
    step_sequences: float | None = None
    context_tokens: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """A model in memory. state: loaded, or loading with `progress` (0 to 1).

    path: of its file; empty if the server does not report it. replica: of a cluster, whose name
    ends the model's; else empty. names: by which it was requested. kv_usage: share of the KV
    cache that running requests use. kv_tokens, kv_used, kv_cached, kv_free: tokens.
    memory_bytes: RAM and GPU memory of the engine process. until_s: seconds until it is
    unloaded if it stays idle; None also means never. silent_s: how long its engine has sent
    nothing, although it should, or None if it answers. threads: that compute now; threads_max:
    when no other process needs a core. kv_tiers: prefixes kept outside of the KV cache.
    """

    name: str
    id: str = ""
    path: str = ""
    replica: str = ""
    names: tuple[str, ...] = ()
    state: str = "loaded"
    progress: float = 1.0
    processor: str | None = None
    ctx: int | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    work_bytes: int | None = None
    rss_bytes: int | None = None
    gpu_bytes: int | None = None
    memory_bytes: int | None = None
    until_s: float | None = None
    silent_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    threads: int | None = None
    threads_max: int | None = None
    kv_tokens: int | None = None
    kv_used: int | None = None
    kv_cached: int | None = None
    kv_free: int | None = None
    kv_usage: float | None = None
    kv_tiers: tuple[KVTierStats, ...] = ()
    ttft: LatencyStats = LatencyStats()
    itl: LatencyStats = LatencyStats()
    counters: ModelCounters = ModelCounters()
    read_cost: ReadCost | None = None
    speculation: SpeculationStats | None = None
    sequences: tuple[SequenceStats, ...] | None = None

    @property
    def served_name(self) -> str:
        """Its name without that of its replica."""
        return self.name.removesuffix(f"@{self.replica}") if self.replica else self.name

    @property
    def lacks_cores(self) -> bool:
        """True if it computes with fewer threads, because other processes use the cores."""
        return (self.threads or 0) < (self.threads_max or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """A server and its models. server_type: localgen, vLLM, SGLang or llama-server.

    num_replicas: of a cluster, or None. finished_requests: newest first.
    """

    server_type: str
    version: str | None = None
    status: str = "ok"
    uptime_s: float | None = None
    rss_bytes: int | None = None
    machine: MachineStats | None = None
    num_replicas: int | None = None
    models: tuple[ModelSnapshot, ...] = ()
    finished_requests: tuple[EndedRequest, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerStats:
    status: str = "ok"
    version: str | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    memory_available: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelInfoStats:
    memory: MemoryUsage = field(default_factory=MemoryUsage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelStats:
    name: str
    id: str = ""
    path: str = ""
    replica: str = ""
    names: tuple[str, ...] = ()
    state: str = "loaded"
    progress: float = 1.0
    rss_bytes: int | None = None
    gpu_bytes: int | None = None
    memory_bytes: int | None = None
    size_bytes: int | None = None
    until_s: float | None = None
    silent_s: float | None = None
    processor: str = ""
    ctx: int = 0
    info: _ModelInfoStats | None = None
    stats: EngineStats | None = None
    read: ReadCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatsResponse:
    server: _ServerStats
    models: tuple[_ModelStats, ...] = ()
    machine: MachineStats | None = None
    replicas: dict[str, Any] | None = None
    ended: tuple[EndedRequest, ...] | None = None


def parse_localgen_stats(payload: dict[str, Any]) -> ServerSnapshot:
    """Parse /v1/stats of a localgen server; missing fields are None, unknown ones ignored.

    Raises ServerUnavailable if its version reports statistics in another form.
    """
    try:
        stats = convert(payload, _StatsResponse)
    except msgspec.ValidationError as error:
        version = _version(payload)
        raise ServerUnavailable(
            f"cannot read the statistics of localgen {version} ({error}): use that version here"
        ) from error
    server = stats.server
    machine = stats.machine
    if machine is None and server.memory_available is not None:
        machine = MachineStats(ram_free_bytes=server.memory_available)
    return ServerSnapshot(
        server_type="localgen",
        version=server.version,
        status=server.status,
        uptime_s=server.uptime_s,
        rss_bytes=server.rss_bytes,
        machine=machine,
        num_replicas=None if stats.replicas is None else len(stats.replicas),
        models=tuple(map(_model_snapshot, stats.models)),
        finished_requests=stats.ended,
    )


def _version(payload: dict[str, Any]) -> str:
    server = payload.get("server")
    return str(server.get("version", "?"))[:20] if isinstance(server, dict) else "?"


def _model_snapshot(reported: _ModelStats) -> ModelSnapshot:
    memory = reported.info.memory if reported.info else None
    model = ModelSnapshot(
        name=reported.name,
        id=reported.id,
        path=reported.path,
        replica=reported.replica,
        names=reported.names,
        state=reported.state,
        progress=reported.progress,
        processor=reported.processor or None,
        ctx=reported.ctx or None,
        weights_bytes=(memory.weights if memory else None) or reported.size_bytes,
        kv_bytes=memory.kv if memory else None,
        work_bytes=memory.work if memory else None,
        rss_bytes=reported.rss_bytes or None,
        gpu_bytes=reported.gpu_bytes,
        memory_bytes=reported.memory_bytes or None,
        until_s=reported.until_s,
        silent_s=reported.silent_s,
        read_cost=reported.read,
    )
    return model if reported.stats is None else _with_stats(model, reported.stats)


def _with_stats(model: ModelSnapshot, stats: EngineStats) -> ModelSnapshot:
    sequences = sum(n * steps for n, steps in enumerate(stats.step_sequences))
    return replace(
        model,
        running=stats.running,
        waiting=stats.waiting,
        threads=stats.threads or None,
        threads_max=stats.threads_max or None,
        kv_tokens=stats.kv_tokens,
        kv_used=stats.kv_used,
        kv_cached=stats.kv_cached,
        kv_free=stats.kv_free,
        kv_usage=stats.kv_used / stats.kv_tokens if stats.kv_tokens else None,
        kv_tiers=stats.kv_tiers,
        ttft=_latency(stats.ttft_last_ms, stats.ttft_p50_ms, stats.ttft_p99_ms),
        itl=_latency(stats.itl_last_ms, stats.itl_p50_ms, stats.itl_p99_ms),
        counters=ModelCounters(
            prompt_tokens=stats.prompt_tokens_total,
            generated_tokens=stats.generation_tokens_total,
            steps=stats.steps_total,
            busy_s=stats.busy_s_total,
            step_sequences=sequences,
            context_tokens=stats.context_tokens_total,
            preemptions=stats.num_preemptions_total,
            prefix_queries=stats.prefix_cache_queries_total,
            prefix_hits=stats.prefix_cache_hits_total,
            draft_tokens=stats.speculation.draft_tokens_total,
            accepted_tokens=stats.speculation.accepted_tokens_total,
        ),
        speculation=stats.speculation,
        sequences=stats.sequences,
    )


def _latency(last_ms: float, p50_ms: float, p99_ms: float) -> LatencyStats:
    """The engine reports 0 for no value."""
    return LatencyStats(last_ms=last_ms or None, p50_ms=p50_ms or None, p99_ms=p99_ms or None)
