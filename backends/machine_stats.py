"""What a server measures beside its engines: the machine, and requests that have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from localgen.backends.types import RequestPhases


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """A GPU at this moment, as its driver says. None: it does not say.

    busy: share of the time in which a kernel ran.
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
    """The machine that a server runs on. cpu: share of all its cores that is at work."""

    cpu: float | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    ram_free_bytes: int | None = None
    gpus: tuple[GpuStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """What a step reads from memory, and how fast memory is.

    weights_bytes: once a step, of a mixture the active experts' only. kv_token_bytes: for each
    token of the contexts in it. medium: which memory. bytes_per_s: what it can be read at; None:
    not known, `how` says why, and otherwise where the figure is from.
    """

    weights_bytes: int
    kv_token_bytes: float
    medium: str
    bytes_per_s: float | None
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that has ended. outcome: stop, length, tool_calls, cancelled, embedded; the code
    of an error; gone: its client left. ended_ago_s: seconds since."""

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
