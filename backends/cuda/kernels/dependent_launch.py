"""Programmatic dependent launch (sm_90 and newer): kernels start while the one before them ends.

A kernel launched with the attribute may start once all programs of the kernel before it have run
`griddepcontrol.launch_dependents` or ended. Its start, and loads of weights, then overlap with the
end of the other. The rule that makes this safe:

    Every program of a kernel launched with the attribute calls `wait_for_previous_kernel` once,
    before any branch, and before it stores anything or loads anything but weights.

The wait returns when the kernel before has ended and its writes are visible. That kernel has waited
too, or was launched without the attribute, and so after the end of all before it. By induction all
earlier kernels have ended: what they wrote can be read, and what they read can be overwritten. A
kernel without the attribute, as torch's and cuBLAS's, starts after the end of all earlier ones,
whatever these have signalled. Weights are constant: what wrote them has ended before a step, which
begins with kernels of torch.

`launch` sets the attribute for kernels that have a `pdl` argument, so none has it without the wait.
tests/test_cuda_dependent_launch.py checks the machine code.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import can_use_triton, compute_capability

_MIN_ARCH = 90


def supports_dependent_launch(x: Tensor) -> bool:
    """True if the kernels of x's device can be launched this way."""
    return can_use_triton(x) and compute_capability(x.device) >= _MIN_ARCH


@triton.jit
def wait_for_previous_kernel(pdl: tl.constexpr):
    """Let the next kernel start, and wait for the end of the one before. pdl: False: do nothing."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
