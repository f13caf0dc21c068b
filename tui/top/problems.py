"""What is wrong with a server, most urgent first: the line below the title of `localgen top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from localgen.backends.engine_stats import kv_tier_name
from localgen.backends.machine_stats import EndedRequest
from localgen.backends.terminal_text import escape_name, one_line
from localgen.client.responses import silence_notice
from localgen.client.snapshot import ModelSnapshot, ServerSnapshot

# ends that are no error of the server
_GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "embedded", "cancelled", "gone"})
_RECENT_S = 60.0
_LOW_MEMORY = 0.03


def problems(snapshot: ServerSnapshot) -> tuple[str, ...]:
    """One sentence for each problem; none if all is well."""
    return (
        *(text for model in snapshot.models for text in _of_engine(model)),
        *_of_requests(snapshot),
        *_of_memory(snapshot),
        *(text for model in snapshot.models for text in _of_tiers(model)),
        *(text for model in snapshot.models for text in _of_cores(model)),
    )


def recently_ended(snapshot: ServerSnapshot) -> list[EndedRequest]:
    """Requests that ended in the last minute."""
    return [each for each in snapshot.finished_requests or () if each.ended_ago_s < _RECENT_S]


def recently_failed(ended: Iterable[EndedRequest]) -> list[EndedRequest]:
    """Those that an error of the server ended."""
    return [each for each in ended if each.outcome not in _GOOD_ENDS]


def _of_engine(model: ModelSnapshot) -> Iterator[str]:
    if model.silent_s is not None:
        yield silence_notice(model.name, model.silent_s)


def _of_requests(snapshot: ServerSnapshot) -> Iterator[str]:
    ended = recently_ended(snapshot)
    failed = Counter(each.outcome for each in recently_failed(ended))
    if failed:
        causes = ", ".join(f"{one_line(why).replace('_', ' ')} {n}" for why, n in failed.items())
        yield f"{failed.total()} of {len(ended)} requests of the last minute failed: {causes}"


def _of_memory(snapshot: ServerSnapshot) -> Iterator[str]:
    machine = snapshot.machine
    if machine is None or not machine.ram_bytes or machine.ram_free_bytes is None:
        return
    if machine.ram_free_bytes < _LOW_MEMORY * machine.ram_bytes:
        yield "main memory is full: localgen stop MODEL frees some"


def _of_tiers(model: ModelSnapshot) -> Iterator[str]:
    for tier in model.kv_tiers:
        if tier.error:
            yield f"prefixes of {escape_name(model.name)} are not kept " + (
                f"({one_line(kv_tier_name(tier.tier))}: {one_line(tier.error)})"
            )


def _of_cores(model: ModelSnapshot) -> Iterator[str]:
    if model.lacks_cores and model.running:
        yield (
            f"other programs use the processor: {escape_name(model.name)} computes with "
            f"{model.threads} of {model.threads_max} threads"
        )
