"""How many tokens a second memory allows: each one reads the active weights and the cache."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.placement.gpu_layers import GpuLayers
from localgen.planning.resources import Machine


@dataclass(frozen=True, slots=True)
class Speed:
    """Upper limits of one stream: with an empty context and with a full one.

    bytes_per_token: with an empty one. bandwidth_bytes_per_s: of what all of it is read from, if
    from several then on average; how: where that is from.
    """

    most_tokens_per_s: float
    most_tokens_per_s_full: float
    bytes_per_token: int
    bandwidth_bytes_per_s: float
    how: str


def speed(
    weights_bytes: float, cache_bytes: float, machine: Machine, on_gpus: tuple[GpuLayers, ...]
) -> Speed | None:
    """weights_bytes, cache_bytes: read for one token. None: a bandwidth is not known."""
    seconds_per_byte, how = 0.0, ""
    left = 1.0
    for one in on_gpus:
        if not one.layers:
            continue
        found = machine.gpu(one.gpu)
        if found is None:
            return None
        share, how = one.layers / one.of, found.how
        seconds_per_byte += share / found.bytes_per_s
        left -= share
    if left > 1e-9:
        ram = machine.ram()
        if not ram.bytes_per_s:
            return None
        seconds_per_byte, how = seconds_per_byte + left / ram.bytes_per_s, ram.how
    return Speed(
        most_tokens_per_s=1 / (max(1.0, weights_bytes) * seconds_per_byte),
        most_tokens_per_s_full=1 / (max(1.0, weights_bytes + cache_bytes) * seconds_per_byte),
        bytes_per_token=round(weights_bytes),
        bandwidth_bytes_per_s=1 / seconds_per_byte,
        how=how,
    )
