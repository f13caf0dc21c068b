"""Captures CUDA graphs into a memory pool that they share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

Replay = Callable[[], None]


class GraphCapture:
    """Captures CUDA graphs. They never run concurrently, so they share one memory pool.

    pool_bytes: most memory that a graph needs. It is reserved in one block by the first capture:
    else each larger graph would add blocks of its own, and the pool would keep the smaller ones.
    """

    def __init__(self, pool_bytes: int = 0) -> None:
        self._pool_bytes = max(1, pool_bytes)
        self._pool: Any = None
        # a graph that stays: a pool cannot be used again once its last graph is gone
        self._reservation: Any = None
        self._abandoned: list[Any] = []

    def __call__(self, forward: Callable[[], object]) -> Replay:
        """Capture the kernels that `forward` launches; return a function that launches them.

        Nothing is computed yet. Raises the errors of `forward`, and RuntimeError.
        """
        if self._reservation is None:
            try:
                self._reservation = self._open_pool(self._pool_bytes)
            except torch.OutOfMemoryError:  # small graphs may fit all the same
                self._reservation = self._open_pool(1)
        return self._capture(forward).replay  # type: ignore[no-any-return]

    def _open_pool(self, num_bytes: int) -> Any:
        self._pool = torch.cuda.graph_pool_handle()
        return self._capture(lambda: self._reserve(num_bytes))

    def _reserve(self, num_bytes: int) -> None:
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda").zero_()

    def _capture(self, forward: Callable[[], object]) -> Any:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # calls of other threads, which compile kernels, do not concern the capture
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                forward()
        except BaseException:
            # torch.cuda.graph leaves its stream current if the end of the capture fails
            torch.cuda.set_stream(stream)
            self._abandon(graph)
            raise
        return graph

    def _abandon(self, graph: Any) -> None:
        """Release what a failed capture holds, so that others and the allocator go on.

        In torch 2.11 a capture whose cudaStreamEndCapture fails stays open for the allocator, which
        then cannot free cached memory any more (pytorch/pytorch#180395 closes it). If it still is
        open here, nothing has released its use of the pool either.
        """
        graph.reset()
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # it is closed
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
            # the allocator of pinned memory cannot be told: it keeps a pointer to the graph, and
            # accepts no capture into this pool
            self._abandoned += [graph, self._reservation]
            self._reservation = None
