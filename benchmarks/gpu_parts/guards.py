"""Guard bytes around the memory that kernels write, which show writes beyond its ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# before and after each tensor; a multiple of the alignment that torch's allocator gives
GUARD_BYTES = 512
_PATTERN = 0xA5
_ALLOCATING = (
    *(torch.empty, torch.empty_like, torch.zeros, torch.zeros_like),
    *(torch.clone, Tensor.clone),
)
_UNGUARDED_ARGUMENTS = {"out", "pin_memory"}


class GuardedAllocations(TorchFunctionMode):
    """Puts guard bytes around the new contiguous tensors of its `with` block.

    Those of torch.empty, torch.zeros, their `_like` forms, and Tensor.clone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guarded: list[tuple[Tensor, Tensor]] = []  # bytes of the whole, the tensor in it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        is_guarded = func in _ALLOCATING and _UNGUARDED_ARGUMENTS.isdisjoint(kwargs)
        return self._guard(made) if is_guarded and made.is_contiguous() else made

    def _guard(self, made: Tensor) -> Tensor:
        size = made.nbytes
        padded = math.ceil(size / GUARD_BYTES) * GUARD_BYTES
        whole = torch.full(
            (GUARD_BYTES + padded + GUARD_BYTES,), _PATTERN, dtype=torch.uint8, device=made.device
        )
        inner = whole[GUARD_BYTES : GUARD_BYTES + size].view(made.dtype).view(made.shape)
        inner.copy_(made)
        self._guarded.append((whole, inner))
        return inner

    def overwritten(self) -> str:
        """Describe the first tensor beyond whose ends something was written; empty if none."""
        for whole, inner in self._guarded:
            begin, end = whole[:GUARD_BYTES], whole[GUARD_BYTES + inner.nbytes :]
            for name, guard in (("before", begin), ("after", end)):
                changed = int((guard != _PATTERN).sum())
                if changed:
                    shape = f"{tuple(inner.shape)} of {inner.dtype}"
                    return f"{changed} bytes {name} an output {shape} were overwritten"
        return ""
