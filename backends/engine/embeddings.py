"""Embedding requests: scheduled in slices between the steps of generation requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.errors import InvalidRequest, LocalgenError, OutOfMemory, QueueFull
from localgen.backends.runner.interface import (
    Chunk,
    Embedder,
    EmbeddingArray,
    EmbedSlice,
    ModelRunner,
    NoRoom,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING
from localgen.backends.types import Embedded, Failed, Timings

# maximum number of inputs in a batch
MAX_INPUTS = 16
# share of the inter-token latency target that a slice may take, so that decoding still meets it
_ITL_FRACTION = 0.5


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingTask:
    """A tokenized embedding request and its progress. Times as in backends/types.py.

    num_scheduled: number of inputs computed or in the current batch. is_ranked: the vectors are
    scores.
    """

    id: str
    inputs: list[list[int]]
    arrived_s: float = 0.0
    tokenize_ms: float = 0.0
    is_ranked: bool = False
    num_scheduled: int = 0
    vectors: list[EmbeddingArray] = field(default_factory=list)
    started_s: float | None = None
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class _EmbeddingBatch:
    """Inputs computed together. tasks: the request of each input, in order."""

    tasks: list[EmbeddingTask]
    slices: Generator[EmbedSlice, None, None]


class EmbeddingScheduler:
    """Schedules embedding requests round-robin by input. Used by the engine thread only.

    results: ended requests that the engine has not fetched yet.
    """

    def __init__(self, runner: ModelRunner, *, itl_target_ms: float, max_queue: int) -> None:
        self._runner = runner
        self._max_queue = max_queue
        self._budget = TokenBudget(runner.limits.max_batch_tokens, itl_target_ms * _ITL_FRACTION)
        self._tasks: dict[str, EmbeddingTask] = {}
        self._waiting: deque[EmbeddingTask] = deque()  # tasks with unscheduled inputs
        self._batch: _EmbeddingBatch | None = None
        self._max_slice_tokens, self._max_batch_inputs = 1, MAX_INPUTS
        self.results: list[Embedded | Failed] = []

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._tasks)

    def submit(self, task: EmbeddingTask) -> None:
        """Queue a request.

        Raises InvalidRequest if the backend cannot compute embeddings, QueueFull if too many
        requests are waiting.
        """
        if not isinstance(self._runner, Embedder):
            raise InvalidRequest("this model's backend does not support embeddings", param="model")
        if len(self._tasks) >= self._max_queue:
            raise QueueFull(
                f"{len(self._tasks)} requests for embeddings are waiting, the limit is "
                f"{self._max_queue}: try again later"
            )
        self._tasks[task.id] = task
        self._waiting.append(task)

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Unknown ids are ignored."""
        texts = self._tasks.get(request_id)
        if texts is None:
            return
        self._fail(texts, "cancelled", "the request was cancelled")
        if self._batch is not None and all(owner.is_ended for owner in self._batch.tasks):
            self.close_batch()

    def fail_all(self, code: str, message: str) -> None:
        """Fail all requests with this error."""
        for texts in list(self._tasks.values()):
            self._fail(texts, code, message)
        self._batch = None

    def step(self, *, num_decoding: int, max_tokens: int) -> int:
        """Compute one slice; return its number of tokens.

        num_decoding: sequences whose next token is delayed by the slice. max_tokens: prefill
        tokens that a step with them may have. Raises StepFailed.
        """
        if not self.has_work:
            return 0
        self._max_slice_tokens = min(max_tokens, self._budget.prompt_tokens(num_decoding))
        started_s = time.monotonic()
        batch = self._batch = self._batch or self._next_batch(started_s)
        try:
            done = next(batch.slices)
        except NoRoom:
            self._requeue(batch, fail_if_single=not num_decoding)
            return 0
        except LocalgenError as error:
            self.close_batch()
            for owner in batch.tasks:
                self._fail(owner, error.code, error.message)
            return 0
        self._budget.observe((time.monotonic() - started_s) * 1e3, done.num_tokens, 0)
        if done.vectors is not None:
            self.close_batch()
            self._store_vectors(batch.tasks, done.vectors)
        return done.num_tokens

    # -- batches ----------------------------------------------------------------------------

    def _next_batch(self, now_s: float) -> _EmbeddingBatch:
        """Build a batch: one input, and more while they fit in a slice, round-robin by request."""
        owners: list[EmbeddingTask] = []
        inputs: list[list[int]] = []
        left = self._max_slice_tokens
        while self._waiting and len(inputs) < self._max_batch_inputs:
            texts = self._waiting[0]
            tokens = texts.inputs[texts.num_scheduled]
            if inputs and len(tokens) > left:
                break
            left -= len(tokens)
            inputs.append(tokens)
            owners.append(texts)
            texts.started_s = texts.started_s or now_s
            texts.num_scheduled += 1
            self._waiting.rotate(-1)
            if texts.num_scheduled == len(texts.inputs):
                self._waiting.pop()
        self._max_batch_inputs = MAX_INPUTS
        assert isinstance(self._runner, Embedder)
        return _EmbeddingBatch(owners, self._runner.embed(inputs, lambda: self._max_slice_tokens))

    def _requeue(self, batch: _EmbeddingBatch, *, fail_if_single: bool) -> None:
        """Return a batch that did not fit in the KV cache to the queue; retry inputs one by one.

        fail_if_single: fail a batch of one input, because no running sequence will free memory.
        """
        self.close_batch()
        if fail_if_single and len(batch.tasks) == 1:
            error = OutOfMemory("the KV cache has no room for the text")
            self._fail(batch.tasks[0], error.code, error.message)
            return
        self._max_batch_inputs = 1
        for texts in reversed(batch.tasks):
            if texts.is_ended:
                continue
            texts.num_scheduled -= 1
            if texts in self._waiting:
                self._waiting.remove(texts)
            self._waiting.appendleft(texts)

    def close_batch(self) -> None:
        """Free the KV cache of the inputs that are being computed, which are given up."""
        if self._batch is not None:
            self._batch.slices.close()
            self._batch = None

    # -- ends -------------------------------------------------------------------------------

    def _store_vectors(self, tasks: list[EmbeddingTask], vectors: EmbeddingArray) -> None:
        for texts, raw, normal in zip(tasks, vectors, l2_normalize(vectors), strict=True):
            if texts.is_ended:
                continue
            vector = raw if texts.is_ranked else normal
            texts.vectors.append(vector)
            if not np.isfinite(vector).all():
                self._fail(texts, "internal_error", "the embeddings contain NaN or infinity")
            elif len(texts.vectors) == len(texts.inputs):
                self._end(texts, embedded_event(texts, time.monotonic()))

    def _fail(self, task: EmbeddingTask, code: str, message: str) -> None:
        if not task.is_ended:
            self._end(task, Failed(task.id, code, message))

    def _end(self, task: EmbeddingTask, result: Embedded | Failed) -> None:
        task.is_ended = True
        del self._tasks[task.id]
        if task in self._waiting:
            self._waiting.remove(task)
        self.results.append(result)


def embedded_event(task: EmbeddingTask, now_s: float) -> Embedded:
    """Return the Embedded event of a request whose inputs are all computed."""
    vectors = np.stack(task.vectors)
    started_s = now_s if task.started_s is None else task.started_s
    counts = tuple(map(len, task.inputs))
    seconds = now_s - started_s
    timings = Timings(
        prompt_n=sum(counts),
        prompt_ms=seconds * 1e3,
        prompt_per_second=sum(counts) / seconds if seconds > 0 else 0.0,
        queue_ms=max(0.0, (started_s - task.arrived_s) * 1e3 - task.tokenize_ms),
        template_ms=task.tokenize_ms,
    )
    return Embedded(
        request_id=task.id,
        vectors=vectors.astype("<f4").tobytes(),
        width=vectors.shape[1],
        prompt_tokens=counts,
        timings=timings,
    )


def l2_normalize(vectors: NDArray[np.floating]) -> EmbeddingArray:
    """Normalize vectors to length 1; zero vectors stay zero. Returns float32 [n, width]."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=-1, keepdims=True)
    return (exact / np.where(lengths == 0, 1, lengths)).astype(np.float32)


# -- for runners ------------------------------------------------------------------------------


def unscheduled_sequences(inputs: list[list[int]]) -> list[Sequence]:
    """Wrap inputs in sequences for a runner; the scheduler never sees them."""
    return [
        Sequence(
            id=f"text {number}",
            tokens=tokens,
            num_prompt=len(tokens),
            params=BASE_SAMPLING,
            ctx=len(tokens),
            max_len=len(tokens),
        )
        for number, tokens in enumerate(inputs)
    ]


def split_into_slices(seqs: list[Sequence], max_tokens: Callable[[], int]) -> Iterator[list[Chunk]]:
    """Split the sequences, in order, into slices of at most max_tokens() tokens.

    Every position of a chunk is an output.
    """
    number = start = 0
    while number < len(seqs):
        left, chunks = max(1, max_tokens()), []
        while left and number < len(seqs):
            seq = seqs[number]
            tokens = seq.tokens[start : start + left]
            chunks.append(
                Chunk(
                    seq=seq,
                    start=start,
                    tokens=tokens,
                    num_drafts=len(tokens) - 1,
                    is_sampled=True,
                )
            )
            left, start = left - len(tokens), start + len(tokens)
            if start == len(seq.tokens):
                number, start = number + 1, 0
        yield chunks


def is_last_slice(chunks: list[Chunk], seqs: list[Sequence]) -> bool:
    """True if the slice ends with the last token of the last sequence."""
    end = chunks[-1]
    return end.seq is seqs[-1] and end.start + len(end) == len(end.seq.tokens)
