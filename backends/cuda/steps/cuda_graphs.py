"""Executes decoder steps, replaying CUDA graphs where one fits.

A graph bakes in every number that the host passes to a kernel, so steps are padded to a few shapes:
the number of sequences and of rows to a bucket, the length to a power of two. Steps of a few rows
per sequence, as those that verify drafts, have graphs too. A shape that has occurred is captured
while no request runs, never in the middle of an answer: until then its steps run eagerly.

With tensor parallelism every rank executes the same steps and captures in the same order, so all
have the same graphs: they count alike, and a capture counts only if it succeeded on all.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kernels.attention.decode import MAX_DECODE_ROWS
from localgen.backends.cuda.kernels.decode_inputs import advance_decode_inputs
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.batch import (
    Int32Array,
    StepBatch,
    StepInputs,
    inputs_to_device,
    unpack_inputs,
)
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.host_copy import pack, packed_bytes, to_device
from localgen.backends.cuda.steps.graph_capture import GraphCapture, Replay
from localgen.backends.memory.compute_buffers import (
    MAX_GRAPH_SEQ_ROWS,
    MAX_GRAPH_SEQS,
    MAX_MULTI_ROW_SEQS,
    cuda_graph_rows,
)

log = logging.getLogger(__name__)

# batch sizes (sequences) that are captured
CAPTURE_SIZES = (1, 2, 4, 8, *range(16, MAX_GRAPH_SEQS + 1, 16))
# rows per sequence that are captured where up to MAX_MULTI_ROW_SEQS sequences have several
CAPTURE_ROWS = (2, 3, 4, 5, MAX_GRAPH_SEQ_ROWS)
MIN_GRAPH_LEN = 1024
# the first steps of a shape are not measured: they may load kernels, and have a graph soon
WARM_UP_RUNS = 8
# without memory for a capture, the next attempt comes after at least as many steps of the shape
RETRY_RUNS = 1000


class _Outcome(IntEnum):
    """Of a capture; over several ranks the highest."""

    CAPTURED = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Shape of a graph: number of sequences, maximum sequence length, and rows per sequence.

    If rows_per_seq is 1, every sequence has at most one row. Else the sequences share num_rows rows
    as they need them, each at most MAX_DECODE_ROWS.
    """

    num_seqs: int
    max_len: int
    rows_per_seq: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of a step of this shape."""
        return self.num_seqs * self.rows_per_seq


@dataclass(frozen=True, slots=True)
class _GraphBuffers:
    """Buffers shared by all graphs, which never run concurrently.

    inputs: uint8, packed step inputs. logits: float32 [rows, vocab].
    """

    inputs: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class _ReplayedDecode:
    """The last step, if it was a replay of one row per sequence: its inputs are on the device.

    max_len: length of its longest sequence.
    """

    shape: GraphShape
    num_seqs: int
    max_len: int


class TokenSource(Protocol):
    """Source of input tokens that are not known to the host."""

    def fill(self, batch: StepBatch) -> None:
        """Write the tokens into `batch.tokens`, all rows by their `source_rows`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreviousStepTokens:
    """Tokens sampled in the previous step, int64 [sampled], on the device.

    A step takes them by its `source_rows`.
    """

    tokens: Tensor

    def fill(self, batch: StepBatch) -> None:
        """See TokenSource.fill."""
        torch.index_select(self.tokens, 0, batch.source_rows, out=batch.tokens)


class DeviceExecutor:
    """Runs the steps of a decoder on one device.

    use_cuda_graphs: pad steps to graph shapes, and capture and replay them. max_seqs: most
    sequences of a step. pool_bytes: see GraphCapture. capture: replaces GraphCapture; without it,
    no graphs are captured on a CPU. is_warming_up: the last step took longer than later ones of
    its shape, which will have a graph.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        use_cuda_graphs: bool,
        max_seqs: int = MAX_GRAPH_SEQS,
        pool_bytes: int = 0,
        capture: Callable[[Callable[[], object]], Replay] | None = None,
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.device = cache.layers[0].keys.device
        self.is_warming_up = False
        self._max_rows = cuda_graph_rows(max_seqs)
        self._use_cuda_graphs = use_cuda_graphs
        self._capture = GraphCapture(pool_bytes) if self.device.type == "cuda" else capture
        self._eager_runs: Counter[GraphShape] = Counter()
        self._graphs: dict[GraphShape, Replay | None] = {}  # None: the capture failed
        self._batches: dict[GraphShape, StepBatch] = {}  # the inputs of each graph
        self._buffers: _GraphBuffers | None = None
        self._last_decode: _ReplayedDecode | None = None

    def run(self, inputs: StepInputs, token_source: TokenSource | None = None) -> Tensor:
        """Return the logits of the output rows, float32 [outputs, vocab].

        They are valid until the next step. token_source: fills in input tokens that are not known
        to the host.
        """
        shape = graph_shape(inputs) if self._use_cuda_graphs else None
        self.is_warming_up, self._last_decode = False, None
        if shape is None:
            return self._run_eager(inputs, token_source)
        padded = pad_inputs(inputs, shape)
        graph = self._graph(shape)
        if graph is None:
            logits = self._run_eager(padded, token_source)
        else:
            logits = self._replay(graph, shape, padded, token_source)
            if shape.rows_per_seq == 1 and len(inputs.output_rows) == len(inputs.seq_lens):
                num_seqs = len(inputs.seq_lens)
                self._last_decode = _ReplayedDecode(shape, num_seqs, inputs.max_seq_len)
        return logits[: len(inputs.output_rows)]

    def advance(self, tokens: Tensor, new_pages: Int32Array | None) -> Tensor | None:
        """See StepExecutor.advance."""
        last, self._last_decode = self._last_decode, None
        if last is None or last.max_len == last.shape.max_len:
            return None
        graph, batch = self._graphs[last.shape], self._batches[last.shape]
        assert graph is not None
        assert self._buffers is not None
        assert len(tokens) == last.num_seqs
        pages = None if new_pages is None else to_device([new_pages], self.device)[0]
        advance_decode_inputs(batch.decode_inputs, tokens, pages, PAGE_TOKENS)
        graph()
        self.is_warming_up = False
        self._last_decode = _ReplayedDecode(last.shape, last.num_seqs, last.max_len + 1)
        return self._buffers.logits[: last.num_seqs]

    @property
    def next_capture(self) -> GraphShape | None:
        """The shape that ran most often without a graph, or None if none is missing."""
        if self._capture is None:
            return None
        waiting = {s: n for s, n in self._eager_runs.items() if n > 0 and s not in self._graphs}
        return max(waiting, key=waiting.__getitem__, default=None)

    def capture_next(self) -> bool:
        """Capture `next_capture`; False if there is none.

        Takes tens of milliseconds, in which no step runs.
        """
        shape = self.next_capture
        if shape is not None:
            self._capture_shape(shape)
        return shape is not None

    def _graph(self, shape: GraphShape) -> Replay | None:
        """Return the graph of a shape, or None if the step has to run eagerly."""
        if shape not in self._graphs and self._capture is not None:
            runs = self._eager_runs[shape]
            # not after a capture without memory: the next one is far
            self.is_warming_up = 0 <= runs < WARM_UP_RUNS
            self._eager_runs[shape] += 1
        return self._graphs.get(shape)

    def _capture_shape(self, shape: GraphShape) -> None:
        """Capture a shape on all ranks. If one fails, all run it eagerly, for good or for long."""
        graph, outcome, reason = None, _Outcome.CAPTURED, "another rank failed"
        try:
            graph = self._capture_forward(shape)
        except Exception as error:  # whatever it is, the step does not depend on the capture
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            outcome = _Outcome.OUT_OF_MEMORY if out_of_memory else _Outcome.FAILED
            reason = str(error).partition("\n")[0] or type(error).__name__
        outcome = _Outcome(self.decoder.group.max_over_ranks(outcome))
        if outcome is _Outcome.CAPTURED:
            self._graphs[shape] = graph
            return
        if outcome is _Outcome.FAILED:
            self._graphs[shape] = None
        else:
            self._eager_runs[shape] = -RETRY_RUNS
        log.warning(
            "steps of %d rows in %d sequences of up to %d tokens run without a CUDA graph, "
            "more slowly: capturing one failed: %s",
            shape.num_rows,
            shape.num_seqs,
            shape.max_len,
            reason,
        )

    def _capture_forward(self, shape: GraphShape) -> Replay:
        assert self._capture is not None
        assert shape.num_rows <= self._max_rows
        buffers = self._buffers = self._buffers or self._allocate()
        batch = self._batches[shape] = unpack_inputs(buffers.inputs, empty_inputs(shape))
        logits = buffers.logits[: shape.num_rows]
        return self._capture(lambda: self.decoder.forward(batch, self.cache, logits))

    def _replay(
        self,
        graph: Replay,
        shape: GraphShape,
        padded: StepInputs,
        token_source: TokenSource | None,
    ) -> Tensor:
        assert self._buffers is not None
        packed = pack(padded.arrays, self.device)
        self._buffers.inputs[: len(packed)].copy_(packed, non_blocking=True)
        if token_source is not None:
            token_source.fill(self._batches[shape])
        graph()
        return self._buffers.logits[: len(padded.output_rows)]

    def _allocate(self) -> _GraphBuffers:
        longest = GraphShape(self._max_rows, _padded_len(self.decoder.max_len))
        size = packed_bytes(empty_inputs(longest).arrays)
        vocab_size = self.decoder.group.shard.spec.vocab_size
        return _GraphBuffers(
            torch.empty(size, dtype=torch.uint8, device=self.device),
            torch.empty(self._max_rows, vocab_size, dtype=torch.float32, device=self.device),
        )

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """See StepExecutor.hidden_states."""
        return self.decoder.hidden_states(inputs_to_device(inputs, self.device), self.cache)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the KV cache. pairs: (source, target) page numbers."""
        self.cache.copy_pages(pairs)

    def _run_eager(self, inputs: StepInputs, token_source: TokenSource | None) -> Tensor:
        batch = inputs_to_device(inputs, self.device)
        if token_source is not None:
            token_source.fill(batch)
        return self.decoder.forward(batch, self.cache)

    def close(self) -> None:
        """Free the graphs and the KV cache."""
        self._graphs.clear()
        self._batches.clear()
        self._buffers = self._last_decode = None
        self.cache.layers.clear()


def graph_shape(inputs: StepInputs) -> GraphShape | None:
    """Return the shape to pad a step to, or None if it needs eager execution.

    Eager: too many sequences, or too many rows of a sequence, or several rows of one of which
    nothing was computed before: a prompt, whose shape may never occur again.
    """
    num_seqs, num_rows = len(inputs.seq_lens), len(inputs.tokens)
    is_single_row = inputs.max_query_len == 1
    if num_seqs > (CAPTURE_SIZES[-1] if is_single_row else MAX_MULTI_ROW_SEQS):
        return None
    size = CAPTURE_SIZES[bisect_left(CAPTURE_SIZES, num_seqs)]
    length = _padded_len(inputs.max_seq_len)
    if is_single_row:
        return GraphShape(size, length)
    query_lens = np.diff(inputs.query_starts)
    if inputs.max_query_len > MAX_DECODE_ROWS or (query_lens == inputs.seq_lens).any():
        return None
    return GraphShape(size, length, next(n for n in CAPTURE_ROWS if n * size >= num_rows))


def _padded_len(length: int) -> int:
    return max(MIN_GRAPH_LEN, 1 << (length - 1).bit_length())


def empty_inputs(shape: GraphShape) -> StepInputs:
    """Inputs of a step of empty sequences, whose rows store nothing in the KV cache."""
    seqs, rows = shape.num_seqs, shape.num_rows
    return StepInputs(
        tokens=np.zeros(rows, np.int64),
        slot_mapping=np.full(rows, -1, np.int64),
        output_rows=np.zeros(rows, np.int64),
        positions=np.zeros(rows, np.int32),
        page_tables=np.zeros((seqs, pages_for(shape.max_len)), np.int32),
        query_starts=np.zeros(seqs + 1, np.int32),
        seq_lens=np.zeros(seqs, np.int32),
        max_query_len=1 if shape.rows_per_seq == 1 else MAX_DECODE_ROWS,
        max_seq_len=shape.max_len,
        source_rows=np.zeros(rows, np.int32),
    )


def pad_inputs(inputs: StepInputs, shape: GraphShape) -> StepInputs:
    """Pad a step to a shape with empty sequences, and rows that belong to no sequence."""
    padded = empty_inputs(shape)
    for target, array in zip(padded.arrays, inputs.arrays, strict=True):
        target[tuple(map(slice, array.shape))] = array
    padded.query_starts[len(inputs.query_starts) :] = inputs.query_starts[-1]
    return padded
