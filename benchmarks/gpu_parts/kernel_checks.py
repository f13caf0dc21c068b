"""Run the kernel cases: compare every kernel with its float64 reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.gpu_parts import (
    advance_cases,
    fused_cases,
    kernel_cases,
    product_cases,
    rejection_cases,
    sampling_cases,
)
from benchmarks.gpu_parts.case import KernelCase, Sizes
from benchmarks.gpu_parts.device import Device, largest_difference, poisoned, relative_error
from benchmarks.gpu_parts.guards import GuardedAllocations
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import CorrectnessCheck

GROUPS: Mapping[str, Callable[[Inputs, Sizes], Iterator[KernelCase]]] = {
    group.__name__: group
    for group in (
        *(kernel_cases.norms, kernel_cases.gates, kernel_cases.rotations, kernel_cases.attentions),
        *(product_cases.products, product_cases.int4_products, product_cases.fp8_products),
        *(
            fused_cases.fused,
            product_cases.mixtures,
            sampling_cases.draws,
            rejection_cases.rejections,
            advance_cases.advances,
        ),
    )
}


def kernels(device: Device, sizes: Sizes, seed: int, group: str) -> Iterator[CorrectnessCheck]:
    """Yield a check per case of a group; an exception fails only its case, or all that follow."""
    generator = torch.Generator(device.torch).manual_seed(seed)
    try:
        for case in GROUPS[group](Inputs(generator, torch.bfloat16), sizes):
            case_begins(case.name)
            yield _checked(case, device)
    except Exception as error:
        yield CorrectnessCheck.raised(f"cases of {group}", error)


@torch.inference_mode()
def _checked(case: KernelCase, device: Device) -> CorrectnessCheck:
    try:
        wanted = case.wanted()
        with poisoned(), warnings.catch_warnings(), GuardedAllocations() as guarded:
            # ignore torch's warnings of nondeterministic operations, which poisoned() enables
            warnings.simplefilter("ignore")
            found = case.found()
        device.synchronize()
        if overwritten := guarded.overwritten():
            return CorrectnessCheck(case.name, 0.0, case.most, overwritten)
        pairs = list(zip(found, wanted, strict=True))
        errors = [relative_error(*pair) for pair in pairs]
        worst = errors.index(max(errors))
        if errors[worst] <= case.most:
            return CorrectnessCheck(case.name, errors[worst], case.most)
        where = f"output {worst}, {largest_difference(*pairs[worst])}"
        return CorrectnessCheck(case.name, errors[worst], case.most, detail=where)
    except Exception as error:
        return CorrectnessCheck.raised(case.name, error)
