"""Run the kernel cases: compare every kernel with its float64 reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_parts import kernel_cases, product_cases, rejection_cases, sampling_cases
from benchmarks.gpu_parts.case import KernelCase, Sizes
from benchmarks.gpu_parts.device import Device, poisoned, relative_error
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.report import CorrectnessCheck, format_error

GROUPS: tuple[Callable[[Inputs, Sizes], Iterator[KernelCase]], ...] = (
    *(kernel_cases.norms, kernel_cases.gates, kernel_cases.rotations, kernel_cases.attentions),
    *(product_cases.products, product_cases.int4_products, product_cases.fp8_products),
    *(product_cases.mixtures, sampling_cases.draws, rejection_cases.rejections),
)


def kernels(device: Device, sizes: Sizes, seed: int) -> Iterator[CorrectnessCheck]:
    """Yield a check per case; an exception fails only its case, or the rest of its group."""
    generator = torch.Generator(device.torch).manual_seed(seed)
    make = Inputs(generator, torch.bfloat16)
    for group in GROUPS:
        try:
            for case in group(make, sizes):
                yield _checked(case, device)
        except Exception as error:  # check the other kernels
            yield CorrectnessCheck(f"cases of {group.__name__}", 0.0, 0.0, format_error(error))


@torch.inference_mode()
def _checked(case: KernelCase, device: Device) -> CorrectnessCheck:
    try:
        wanted = case.wanted()
        with poisoned(), warnings.catch_warnings():
            # ignore torch's warnings of nondeterministic operations, which poisoned() enables
            warnings.simplefilter("ignore")
            found = case.found()
        device.synchronize()
        pairs = zip(found, wanted, strict=True)
        return CorrectnessCheck(case.name, max(relative_error(*pair) for pair in pairs), case.most)
    except Exception as error:
        return CorrectnessCheck(case.name, 0.0, case.most, format_error(error))
