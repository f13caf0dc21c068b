"""Statistics of an engine, as they cross process boundaries: frozen, and made of plain values.

Durations are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# upper bounds in tokens of the histogram of step sizes, which has one more bucket above the last
STEP_TOKENS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPhases:
    """Duration of each phase of a request in ms, in order; 0 if not started.

    cached: reusing the cached prefix; prefill: all prefill steps but the last; first_step: the last
    prefill step, which samples the first token; decode: everything after it.
    """

    template_ms: float = 0.0
    queue_ms: float = 0.0
    cached_ms: float = 0.0
    prefill_ms: float = 0.0
    first_step_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """State of one request in the engine. state: queued, prefill or decode.

    ttft_ms: None before the first token. restored: the cached tokens that came from RAM or disk, as
    text, or empty.
    """

    request_id: str
    client: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    ctx: int
    age_s: float
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ttft_ms: float | None = None
    phases: RequestPhases = RequestPhases()
    restored: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Speculative decoding statistics: recent values, then totals since the engine started.

    drafters: available drafters. share: fraction of recent steps that had draft tokens.
    reason: why most steps had none.
    acceptance: fraction of recent draft tokens that were accepted.
    tokens_per_step: per sequence.
    speedup: over plain decode steps of the same batch size.
    drafting_steps_total: steps that verified draft tokens, counted once for the whole batch.
    """

    drafters: tuple[str, ...] = ()
    share: float = 0.0
    reason: str = ""
    acceptance: float = 0.0
    tokens_per_step: float = 0.0
    speedup: float = 0.0
    drafting_steps_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0


# at its end, an engine with a disk tier saves prefixes for at most this time
SAVE_TIMEOUT_S = 10.0
# from the nearest to the farthest
KV_TIERS = ("ram", "disk", "peer")


def kv_tier_name(tier: str) -> str:
    """A tier as people read it: RAM, disk, peer."""
    return "RAM" if tier == "ram" else tier


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierStats:
    """Prefixes that are kept outside of the KV cache, in RAM, on disk or by another engine.

    tier: ram, disk or peer. num_bytes: of this model's blocks. limit_bytes: of the tier, that of
    the disk for all models together; both 0 for a peer. hit_tokens_total: tokens that came from it.
    saved_s_total: by how much longer computing them would have taken. refused_total: files that
    were damaged, of somebody else, or of another model. error: why nothing is written, or why the
    peer gives nothing, or empty. unsaved_tokens: of prefixes that are to be written to the disk, at
    most: some may be there. unwritten_tokens_total: had no room there, nor in
    memory while too much waited, or are read slower than computed.
    """

    tier: str
    blocks: int
    num_bytes: int
    limit_bytes: int
    hit_tokens_total: int
    saved_s_total: float
    refused_total: int = 0
    error: str = ""
    unsaved_tokens: int = 0
    unwritten_tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """A LoRA adapter in the memory of a model. running: requests that use it now."""

    name: str
    num_bytes: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Snapshot of the engine: current gauges, then totals since it started.

    kv_*: tokens of the KV cache; kv_used: by running requests, kv_cached: by the prefix cache.
    kv_page_tokens: it is allocated in pages of this many tokens.
    threads: that compute now, threads_max: when no other process needs a core, or 0 if none does.
    step_sequences[n]: number of steps that computed n sequences (index 0 unused).
    step_tokens: histogram of tokens per step, with the buckets STEP_TOKENS_BOUNDS.
    *_per_s, ttft_* and itl_* cover at most the last minute; *_last_ms: the latest value, 0 if there
    is none. busy_s_total: duration of all steps. context_tokens_total: cached tokens attended to,
    summed over sequences and steps. adapters: loaded ones, the latest used last.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    kv_free: int = 0
    kv_page_tokens: int = 1
    token_budget: int = 0
    threads: int = 0
    threads_max: int = 0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    ttft_last_ms: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    itl_last_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0
    steps_total: int = 0
    busy_s_total: float = 0.0
    step_tokens_total: int = 0
    context_tokens_total: int = 0
    step_sequences: tuple[int, ...] = ()
    step_tokens: tuple[int, ...] = ()
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    num_preemptions_total: int = 0
    requests_total: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationStats = SpeculationStats()
    kv_tiers: tuple[KVTierStats, ...] = ()
    sequences: tuple[SequenceStats, ...] = ()
    adapters: tuple[AdapterStats, ...] = ()
