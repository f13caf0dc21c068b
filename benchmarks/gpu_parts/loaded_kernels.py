"""Registers and memory of the Triton kernels that this process has launched."""

from __future__ import annotations

import gc

from triton.compiler import CompiledKernel


def loaded_kernels() -> dict[str, dict[str, int]]:
    """Registers and spilled bytes a thread, and bytes of shared memory, of each loaded variant.

    By the kernel's name and a part of its hash.
    """
    compiled = [each for each in gc.get_objects() if type(each) is CompiledKernel]
    loaded = [each for each in compiled if each.module is not None]
    return {
        f"{each.name} {each.hash[:8]}": {
            "registers": each.n_regs,
            "spilled_bytes": each.n_spills,
            "shared_bytes": each.metadata.shared,
            "warps": each.metadata.num_warps,
        }
        for each in sorted(loaded, key=lambda each: (each.name, each.hash))
    }
