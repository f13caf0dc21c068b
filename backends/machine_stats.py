"""Statistics of the machine and of finished requests, measured by the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.engine_stats import RequestPhases


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """Current state of a GPU. None: not reported by the driver.

    busy: fraction of time in which a kernel was running.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    busy: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStats:
    """Current state of the server's machine. cpu: utilization over all cores, 0 to 1."""

    cpu: float | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    ram_free_bytes: int | None = None
    gpus: tuple[GpuStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """Bytes that a step reads from memory, and the memory bandwidth.

    weights_bytes: per step; active experts only for a mixture-of-experts model.
    kv_token_bytes: per context token.
    medium: the memory that is read.
    bytes_per_s: memory bandwidth, None if unknown.
    how: source of the bandwidth figure, or the reason why it is unknown.
    """

    weights_bytes: int
    kv_token_bytes: float
    medium: str
    bytes_per_s: float | None
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that has ended.

    outcome: a finish reason (stop, length, tool_calls, cancelled), embedded, an error code, or gone
    if the client disconnected. ended_ago_s: seconds since the end. prefix_break: where its prompt
    parts from an earlier one, or empty if nowhere, or not for this client to know. restored: as in
    SequenceStats.
    """

    request_id: str
    model: str
    client: str
    outcome: str
    ended_ago_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ctx: int = 0
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    phases: RequestPhases = field(default_factory=RequestPhases)
    prefix_break: str = ""
    restored: str = ""
