"""Number of a model's layers that fit on each GPU."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.memory.system import RESERVED_BYTES
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Hardware, Placement
from localgen.placement.footprint import Footprint


@dataclass(frozen=True, slots=True)
class GpuLayers:
    """layers: number on this GPU, out of `of`; llama.cpp counts the output as a layer."""

    gpu: Gpu
    layers: int
    of: int


def assign_gpu_layers(
    hardware: Hardware, placement: Placement, footprint: Footprint, kv_tokens: int
) -> tuple[GpuLayers, ...]:
    """Assign layers to GPUs in order; empty if no GPU can be used."""
    assert footprint.shape is not None
    if placement.gpu is not None:  # the cuda backend has all layers on a GPU
        layers = footprint.shape.num_layers
        return (GpuLayers(placement.gpu, layers, layers),)
    if placement.backend != "llamacpp" or not hardware.gpus or not hardware.llamacpp_has_gpu():
        return ()
    of = left = footprint.shape.num_layers + 1
    layer_bytes = (footprint.weights_bytes + kv_tokens * footprint.kv_token_bytes) / of
    fixed = footprint.fixed_bytes + kv_tokens * footprint.work_token_bytes + RESERVED_BYTES
    found = []
    for gpu in hardware.gpus:
        fitting = int(max(0.0, gpu.free_bytes - fixed) / layer_bytes) if layer_bytes else left
        found.append(GpuLayers(gpu, min(left, fitting), of))
        left -= found[-1].layers
    return tuple(found)
