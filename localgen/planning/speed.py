"""Upper limit of decode speed: each token reads the active weights and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.placement.gpu_layers import GpuLayers
from localgen.planning.resources import MachineResources


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Upper limits of the decode speed of one sequence, with an empty and with a full context.

    bytes_per_token: with an empty context. bandwidth_bytes_per_s: averaged over the devices the
    model is on. how: source of the bandwidth figure.
    """

    most_tokens_per_s: float
    most_tokens_per_s_full: float
    bytes_per_token: int
    bandwidth_bytes_per_s: float
    how: str


def estimate_speed(
    weights_bytes: float,
    cache_bytes: float,
    resources: MachineResources,
    gpu_layers: tuple[GpuLayers, ...],
) -> SpeedEstimate | None:
    """Estimate the speed from the bytes read per token. Returns None if a bandwidth is unknown."""
    seconds_per_byte, how = 0.0, ""
    left = 1.0
    for one in gpu_layers:
        if not one.layers:
            continue
        found = resources.gpu_bandwidth(one.gpu)
        if found is None:
            return None
        share, how = one.layers / one.of, found.source
        seconds_per_byte += share / found.bytes_per_s
        left -= share
    if left > 1e-9:
        ram = resources.ram_bandwidth()
        if not ram.bytes_per_s:
            return None
        seconds_per_byte, how = seconds_per_byte + left / ram.bytes_per_s, ram.source
    return SpeedEstimate(
        most_tokens_per_s=1 / (max(1.0, weights_bytes) * seconds_per_byte),
        most_tokens_per_s_full=1 / (max(1.0, weights_bytes + cache_bytes) * seconds_per_byte),
        bytes_per_token=round(weights_bytes),
        bandwidth_bytes_per_s=1 / seconds_per_byte,
        how=how,
    )
