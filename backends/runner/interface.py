"""The border between scheduling and a model: tokens go in, tokens come out, never logits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import PositionLogprobs

# of one sequence in one step: with the token before them they fill a kernel's tile
MAX_DRAFT_TOKENS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a loaded model can do; discovered at load, never configured afterwards.

    max_seqs: sequences running at once. max_batch_tokens: tokens in one step. max_outputs:
    positions sampled in one step. max_len: tokens in one sequence. kv_tokens: tokens in the pool,
    at least max_len. can_rewind: the cache can be cut back and shared; without it there are no
    drafts and no prefix reuse. unsupported: fields of SamplingParams that this runner cannot
    honour; asking for them is an error. can_generate: whether the model can write an answer; a pure
    embedding model cannot. can_sample_drafts: whether it can show what a token was drawn from, and
    verify drafts that were drawn. runs_ahead: whether plain steps are launched before they are
    asked for, in vain where drafts come instead; such a runner is a AsyncRunner.
    """

    max_seqs: int
    max_batch_tokens: int
    max_outputs: int
    max_len: int
    kv_tokens: int
    can_rewind: bool
    unsupported: frozenset[str] = frozenset()
    can_generate: bool = True
    can_sample_drafts: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens of one sequence to compute in one step.

    tokens: at positions start, start+1, …; the last num_drafts of them are proposals.
    is_sampled: whether the chunk reaches the end of the sequence, so that its last
    1 + num_drafts positions are sampled. draft_probs: for each draft what it was drawn from, as
    SampledTokens has it; empty: the drafts are points. return_probs: whether that is wanted of the
    token. The last two are for runners that are stochastic.
    """

    seq: Sequence
    start: int
    tokens: list[int]
    num_drafts: int = 0
    is_sampled: bool
    draft_probs: Seq[Any] = ()
    return_probs: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """New tokens of one chunk: accepted drafts and the one after; empty while prefilling.

    probs: what the token was drawn from, if the chunk shows it; in the runner's own form.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    probs: Any = None


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Tokens of the KV pool: used by running sequences, kept as prefixes, free."""

    used: int
    cached: int
    free: int


StepResult = list[SampledTokens]
EmbeddingArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbedSlice:
    """Tokens of texts that were computed in one go; with the last of them, the vectors.

    vectors: [inputs, width], of any length.
    """

    num_tokens: int
    vectors: EmbeddingArray | None = None


class NoRoom(Exception):
    """The pool has no room for this now, even after dropping every kept prefix."""


class StepFailed(Exception):
    """The model could not compute a step; its state is lost and the engine must end."""


class ModelRunner(Protocol):
    """A loaded model. All calls come from one thread; none but launch while a step is in flight."""

    limits: Limits

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """Make room for all tokens of `seq`; returns how many of them are in the cache already.

        At least one token is left to compute. NoRoom if fewer than `spare` tokens of the
        pool would stay free or reclaimable.
        """
        ...

    def grow(self, seq: Sequence, n: int) -> bool:
        """Make room for n tokens beyond those computed; False if the pool is exhausted."""
        ...

    def launch(self, chunks: Seq[Chunk]) -> Any:
        """Start a step; returns a ticket for collect. The chunks fit the limits.

        What Sequence.barred and a sequence's grammar rule out is not sampled.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for a step; one SampledTokens for each chunk, in order. NoRoom, StepFailed."""
        ...

    def rewind(self, seq: Sequence, length: int) -> None:
        """Forget what the cache holds of `seq` beyond its first `length` tokens."""
        ...

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Give up the room of `seq`; keep: its computed tokens may serve others as a prefix."""
        ...

    def usage(self) -> PoolUsage:
        """How the pool is used now."""
        ...

    def close(self) -> None:
        """Free everything. No call may follow."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """What a ModelRunner can do besides, where steps are launched before they are asked for."""

    def synchronize(self) -> None:
        """Wait until the device has computed all that was launched. StepFailed."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """What a ModelRunner can do besides, where its model's states can be read."""

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        """Vectors of inputs of at most max_len tokens each, slice by slice.

        Between slices steps may be computed, but none may be in flight when the next slice is asked
        for. max_tokens: tokens of a slice, as far as a text can be cut. Closing the generator ends
        it early; what it holds of the pool is given back when it ends. The first slice may raise
        NoRoom. StepFailed, LocalgenError.
        """
        ...
