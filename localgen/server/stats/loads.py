"""/v1/loads: the load of a server in SGLang's form, which smg reads to choose a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from typing import Any

import localgen
from localgen.backends.engine_stats import EngineStats
from localgen.backends.errors import InvalidRequest

PATH = "/v1/loads"
# SGLang's names. spec, lora and disagg are accepted and empty: not counted, or no such thing here
_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Load of an engine, or the sum of several, under SGLang's names.

    num_waiting_uncached_tokens: prompt tokens of the requests in engines' queues; which of them are
    cached is known only when a request starts. num_used_tokens: of running requests.
    max_total_num_tokens: size of the KV cache. gen_throughput: tokens/s of the latest steps.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    max_running_requests: int = 0
    gen_throughput: float = 0.0

    @classmethod
    def of_engine(cls, stats: EngineStats, max_seqs: int) -> ServerLoad:
        """max_seqs: sequences that may run at the same time."""
        queued = [each for each in stats.sequences if each.state == "queued"]
        return cls(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_waiting_uncached_tokens=sum(each.prompt_tokens for each in queued),
            num_used_tokens=stats.kv_used,
            max_total_num_tokens=stats.kv_tokens,
            max_running_requests=max_seqs,
            gen_throughput=stats.decode_tokens_per_s,
        )

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ServerLoad:
        """The load that a body of /v1/loads tells."""
        (load,) = body["loads"]
        return cls(**{each.name: load[each.name] for each in fields(cls) if each.name in load})

    def __add__(self, other: ServerLoad) -> ServerLoad:
        names = [each.name for each in fields(self)]
        sums = map(sum, zip(astuple(self), astuple(other), strict=True))
        return ServerLoad(**dict(zip(names, sums, strict=True)))


def read_sections(include: str | None) -> frozenset[str]:
    """The sections that a query names, all by default. Raises InvalidRequest for an unknown one."""
    names = frozenset(name.strip() for name in (include or "all").split(","))
    if unknown := sorted(names.difference(_SECTIONS)):
        known = ", ".join(_SECTIONS)
        raise InvalidRequest(f"include: unknown section {unknown[0]!r}: {known}", param="include")
    return frozenset(_SECTIONS) if "all" in names else names


def loads_body(load: ServerLoad, sections: frozenset[str]) -> dict[str, Any]:
    """The body of /v1/loads: one load, without what is not known."""
    described: dict[str, Any] = {"dp_rank": 0}
    if "core" in sections:
        described |= _core(load)
    if "memory" in sections and load.max_total_num_tokens:
        described["memory"] = {"token_capacity": load.max_total_num_tokens}
    if "queues" in sections:
        described["queues"] = {"waiting": load.num_waiting_reqs}
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": localgen.__version__,
        "dp_rank_count": 1,
        "loads": [described],
    }


def _core(load: ServerLoad) -> dict[str, Any]:
    core: dict[str, Any] = {
        "num_running_reqs": load.num_running_reqs,
        "num_waiting_reqs": load.num_waiting_reqs,
        "num_total_reqs": load.num_running_reqs + load.num_waiting_reqs,
        "num_waiting_uncached_tokens": load.num_waiting_uncached_tokens,
    }
    if load.max_total_num_tokens:  # else no model is loaded
        core |= {
            "num_used_tokens": load.num_used_tokens,
            "max_total_num_tokens": load.max_total_num_tokens,
            "token_usage": load.num_used_tokens / load.max_total_num_tokens,
            "max_running_requests": load.max_running_requests,
        }
    if load.gen_throughput:
        core["gen_throughput"] = load.gen_throughput
    return core
