"""Counts the memory of steps on the meta device: bytes of live tensors, and their peak.

Eager torch frees a tensor when its last reference goes, so the count is exact for what a step
allocates itself, in the order in which it does so on a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch.cuda rounds allocations up to this
_ALIGNMENT = 512
# operations that allocate one more tensor of their input's size inside
_WITH_COPY = {torch.ops.aten.logsumexp.default}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts meta tensors that are allocated. now: bytes. peak: the most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by address of the storage; 0: allocated before

    def __enter__(self) -> LiveBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        for tensor in inputs:
            self._sizes.setdefault(tensor.untyped_storage()._cdata, 0)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        inside = inputs[0].nbytes if func in _WITH_COPY else 0
        self.peak = max(self.peak, self.now + inside)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            self.now += size
            weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
