"""A server at one moment, whichever it is. None: it does not say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from localgen.backends.errors import ServerUnavailable
from localgen.backends.machine_stats import EndedRequest, MachineUse, ReadCost
from localgen.backends.model_info import MemoryUse
from localgen.backends.types import EngineStats, SequenceStats, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds: the last one, and of the last minute."""

    last_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters that only grow, until the engine behind them starts anew.

    step_sequences: sequences of each step, summed; context_tokens: what they look at.
    """

    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    steps: float | None = None
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

    kv_share: of the KV cache that running requests use; the tokens where they are told.
    sessions: its requests; None: the server does not list them. until_s: seconds until it is
    unloaded if nothing uses it; None: never, or not told.
    """

    name: str
    id: str = ""
    state: str = "loaded"
    progress: float = 1.0
    processor: str | None = None
    ctx: int | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    work_bytes: int | None = None
    rss_bytes: int | None = None
    gpu_bytes: int | None = None
    until_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_tokens: int | None = None
    kv_used: int | None = None
    kv_cached: int | None = None
    kv_free: int | None = None
    kv_share: float | None = None
    ttft: Latency = Latency()
    itl: Latency = Latency()
    totals: Totals = Totals()
    read: ReadCost | None = None
    speculation: SpeculationStats | None = None
    sessions: tuple[SequenceStats, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """kind: localgen, vLLM, SGLang, llama-server. ended: newest first; None: not told.

    notes: what a user should know of how this was read.
    """

    kind: str
    version: str | None = None
    status: str = "ok"
    uptime_s: float | None = None
    rss_bytes: int | None = None
    machine: MachineUse | None = None
    models: tuple[ModelSnapshot, ...] = ()
    ended: tuple[EndedRequest, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    status: str = "ok"
    version: str | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    memory_available: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Info:
    memory: MemoryUse = field(default_factory=MemoryUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    name: str
    id: str = ""
    state: str = "loaded"
    progress: float = 1.0
    rss_bytes: int | None = None
    gpu_bytes: int | None = None
    size_bytes: int | None = None
    until_s: float | None = None
    processor: str = ""
    ctx: int = 0
    info: _Info | None = None
    stats: EngineStats | None = None
    read: ReadCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stats:
    server: _Server
    models: tuple[_Model, ...] = ()
    machine: MachineUse | None = None
    ended: tuple[EndedRequest, ...] | None = None


def snapshot_of(told: dict[str, Any]) -> Snapshot:
    """What /v1/stats of a localgen server says. ServerUnavailable: it is too different from ours.

    Fields that it does not have are None, those that are new to us are left out.
    """
    try:
        stats = msgspec.convert(told, _Stats)
    except msgspec.ValidationError as error:
        version = _version(told)
        raise ServerUnavailable(
            f"localgen {version} there tells its figures otherwise ({error}): use that version here"
        ) from error
    server = stats.server
    machine = stats.machine
    if machine is None and server.memory_available is not None:
        machine = MachineUse(ram_free_bytes=server.memory_available)
    return Snapshot(
        kind="localgen",
        version=server.version,
        status=server.status,
        uptime_s=server.uptime_s,
        rss_bytes=server.rss_bytes,
        machine=machine,
        models=tuple(map(_model, stats.models)),
        ended=stats.ended,
    )


def _version(told: dict[str, Any]) -> str:
    server = told.get("server")
    return str(server.get("version", "?"))[:20] if isinstance(server, dict) else "?"


def _model(told: _Model) -> ModelSnapshot:
    memory = told.info.memory if told.info else None
    model = ModelSnapshot(
        name=told.name,
        id=told.id,
        state=told.state,
        progress=told.progress,
        processor=told.processor or None,
        ctx=told.ctx or None,
        weights_bytes=(memory.weights if memory else None) or told.size_bytes,
        kv_bytes=memory.kv if memory else None,
        work_bytes=memory.work if memory else None,
        rss_bytes=told.rss_bytes or None,
        gpu_bytes=told.gpu_bytes,
        until_s=told.until_s,
        read=told.read,
    )
    return model if told.stats is None else _with_stats(model, told.stats)


def _with_stats(model: ModelSnapshot, stats: EngineStats) -> ModelSnapshot:
    sequences = sum(n * steps for n, steps in enumerate(stats.step_sequences))
    return replace(
        model,
        running=stats.running,
        waiting=stats.waiting,
        kv_tokens=stats.kv_tokens,
        kv_used=stats.kv_used,
        kv_cached=stats.kv_cached,
        kv_free=stats.kv_free,
        kv_share=stats.kv_used / stats.kv_tokens if stats.kv_tokens else None,
        ttft=_latency(stats.ttft_last_ms, stats.ttft_p50_ms, stats.ttft_p99_ms),
        itl=_latency(stats.itl_last_ms, stats.itl_p50_ms, stats.itl_p99_ms),
        totals=Totals(
            prompt_tokens=stats.prompt_tokens_total,
            generated_tokens=stats.generation_tokens_total,
            steps=stats.steps_total,
            step_sequences=sequences,
            context_tokens=stats.context_tokens_total,
            preemptions=stats.num_preemptions_total,
            prefix_queries=stats.prefix_cache_queries_total,
            prefix_hits=stats.prefix_cache_hits_total,
            draft_tokens=stats.speculation.draft_tokens_total,
            accepted_tokens=stats.speculation.accepted_tokens_total,
        ),
        speculation=stats.speculation,
        sessions=stats.sequences,
    )


def _latency(last_ms: float, p50_ms: float, p99_ms: float) -> Latency:
    """The engine says 0 where it has seen none."""
    return Latency(last_ms=last_ms or None, p50_ms=p50_ms or None, p99_ms=p99_ms or None)
