"""Steps of the decoder, replayed from CUDA graphs where one fits.

A graph bakes in every number that the host passes to a kernel. Decoding steps are therefore padded
to a few shapes: sequences to a bucket, lengths to a power of two. A shape is captured when it comes
back, not before: nothing is computed ahead of the first answer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import Batch, StepInputs, on_device, pack, unpack
from localgen.backends.cuda.model.decoder import Decoder, KVCache

# sequences of a captured step
BUCKETS = (1, 2, 4, 8, *range(16, 257, 16))
LEAST_LEN = 1024
# a shape is captured when it comes up for the second time
_SEEN_BEFORE = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What is baked into a graph: sequences, and the longest length they may have."""

    sequences: int
    max_len: int


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory that all graphs read and write, for no two run at once.

    inputs: uint8, a packed copy. logits: float32 [sequences, vocab]. pool: all in between.
    """

    inputs: Tensor
    logits: Tensor
    pool: Any


class TokenSource(Protocol):
    """Where tokens come from that the host does not know."""

    def fill(self, tokens: Tensor) -> None:
        """Put them where they belong. tokens: int64, [rows] and what they are padded to."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Latest:
    """Tokens of the step before, on the device: row i continues `tokens[sources[i]]`.

    tokens: int64 [sampled]. sources: int64 [rows], on the device.
    """

    tokens: Tensor
    sources: Tensor

    def fill(self, tokens: Tensor) -> None:
        """As TokenSource.fill."""
        tokens[: len(self.sources)] = self.tokens[self.sources]


class DeviceSteps:
    """Computes the steps of a decoder over its cache. graphs: whether shapes are padded, and
    captured where there is a GPU."""

    def __init__(self, decoder: Decoder, cache: KVCache, *, graphs: bool) -> None:
        self.decoder, self.cache = decoder, cache
        self.device = cache.layers[0].keys.device
        self._graphs = graphs
        self._seen: dict[Shape, int] = {}
        self._captured: dict[Shape, Any] = {}
        self._buffers: _Buffers | None = None

    def run(self, inputs: StepInputs, latest: TokenSource | None = None) -> Tensor:
        """Logits of the outputs, float32 [outputs, vocab], valid until the next step.

        latest: tokens that only the device knows, to be filled in.
        """
        shape = shape_of(inputs) if self._graphs else None
        if shape is None:
            return self._eager(on_device(inputs, self.device), latest)
        padded = pad(inputs, shape)
        count = self._seen[shape] = self._seen.get(shape, 0) + 1
        if count <= _SEEN_BEFORE or self.device.type == "cpu":
            return self._eager(on_device(padded, self.device), latest)[: len(inputs.outputs)]
        return self._replay(padded, shape, latest)[: len(inputs.outputs)]

    def _replay(self, padded: StepInputs, shape: Shape, latest: TokenSource | None) -> Tensor:
        buffers = self._buffers = self._buffers or self._allocate(padded)
        packed = pack(padded, pinned=True)
        buffers.inputs[: len(packed)].copy_(packed, non_blocking=True)
        batch, logits = unpack(buffers.inputs, padded), buffers.logits[: shape.sequences]
        if latest is not None:
            latest.fill(batch.tokens)
        if shape not in self._captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=buffers.pool):
                self.decoder.forward(batch, self.cache, logits)
            self._captured[shape] = graph
        self._captured[shape].replay()
        return logits

    def _allocate(self, padded: StepInputs) -> _Buffers:
        longest = Shape(BUCKETS[-1], _rounded(self.decoder.max_len))
        size = sum(array.nbytes for array in pad(padded, longest).arrays)
        vocab = self.decoder.spec.vocab
        return _Buffers(
            torch.empty(size, dtype=torch.uint8, device=self.device),
            torch.empty(BUCKETS[-1], vocab, dtype=torch.float32, device=self.device),
            torch.cuda.graph_pool_handle(),
        )

    def states(self, inputs: StepInputs) -> Tensor:
        """As Steps.states."""
        return self.decoder.states(on_device(inputs, self.device), self.cache)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the cache, (source, target) each."""
        self.cache.copy(pairs)

    def _eager(self, batch: Batch, latest: TokenSource | None) -> Tensor:
        if latest is not None:
            latest.fill(batch.tokens)
        return self.decoder.forward(batch, self.cache)

    def close(self) -> None:
        """Give up graphs and cache."""
        self._captured.clear()
        self._buffers = None
        self.cache.layers.clear()


def shape_of(inputs: StepInputs) -> Shape | None:
    """The shape that a step is padded to; None: it is no step of single tokens, or too wide."""
    sequences = len(inputs.lengths)
    if inputs.max_rows > 1 or len(inputs.outputs) < sequences or sequences > BUCKETS[-1]:
        return None
    return Shape(BUCKETS[bisect_left(BUCKETS, sequences)], _rounded(inputs.max_len))


def _rounded(length: int) -> int:
    return max(LEAST_LEN, 1 << (length - 1).bit_length())


def pad(inputs: StepInputs, shape: Shape) -> StepInputs:
    """The same step with sequences of no tokens behind it, which store nothing."""
    missing = shape.sequences - len(inputs.lengths)
    width = pages_for(shape.max_len)
    tables = np.zeros((shape.sequences, width), np.int32)
    tables[: len(inputs.tables), : inputs.tables.shape[1]] = inputs.tables
    return StepInputs(
        tokens=np.pad(inputs.tokens, (0, missing)),
        slots=np.pad(inputs.slots, (0, missing), constant_values=-1),
        outputs=np.arange(shape.sequences),
        positions=np.pad(inputs.positions, (0, missing)),
        tables=tables,
        starts=np.pad(inputs.starts, (0, missing), mode="edge"),
        lengths=np.pad(inputs.lengths, (0, missing)),
        max_rows=1,
        max_len=shape.max_len,
    )
