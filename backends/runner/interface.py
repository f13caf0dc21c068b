"""The ModelRunner interface: token ids go in, sampled token ids come out, never logits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localgen.backends.engine_stats import AdapterStats
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import PositionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits and capabilities of a loaded model, determined at load time.

    max_seqs: maximum number of running sequences.
    max_batch_tokens: maximum number of tokens in a step.
    max_outputs: maximum number of positions in a step that are sampled or scored.
    max_len: maximum length of a sequence in tokens.
    kv_tokens: size of the KV cache in tokens, at least max_len.
    page_tokens: the KV cache is allocated in pages of this many tokens.
    can_rewind: the KV cache can be truncated and shared; without it there is no speculative
    decoding and no prefix cache.
    unsupported: fields of SamplingParams that this runner rejects.
    can_generate: False for an embedding-only model.
    can_rank: a reranking model, whose Embedder returns one score for each pair of query and
    document, and no embeddings; its tokenizer is a PairTokenizer.
    can_sample_drafts: can return the distribution that a token was sampled from, and verify sampled
    draft tokens against theirs.
    runs_ahead: launches the next decode step before it is requested, and discards it if drafts are
    verified instead; such a runner implements AsyncRunner.
    """

    max_seqs: int
    max_batch_tokens: int
    max_outputs: int
    max_len: int
    kv_tokens: int
    can_rewind: bool
    page_tokens: int = 1
    unsupported: frozenset[str] = frozenset()
    can_generate: bool = True
    can_rank: bool = False
    can_sample_drafts: bool = False
    runs_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens of one sequence to compute in one step.

    tokens: at positions start, start + 1, …; the last num_drafts of them are draft tokens.
    is_sampled: the chunk reaches the end of the sequence, so its last 1 + num_drafts positions are
    sampled.
    num_scored: positions before the sampled ones after which the logprob of the prompt's next token
    is returned; see Sequence.is_scored.
    draft_probs: for each draft token the distribution it was sampled from, in the form of
    SampledTokens.probs, or empty for greedy drafts.
    return_probs: return the distribution of the sampled token.

    draft_probs and return_probs require Limits.can_sample_drafts.
    """

    seq: Sequence
    start: int
    tokens: list[int]
    num_drafts: int = 0
    is_sampled: bool
    num_scored: int = 0
    draft_probs: Seq[Any] = ()
    return_probs: bool = False

    @classmethod
    def of_uncomputed(cls, seq: Sequence, count: int, *, return_probs: bool = False) -> Chunk:
        """The next `count` uncomputed tokens of a sequence, sampled if these are all."""
        start = seq.num_computed
        is_sampled = count == seq.num_uncomputed
        return cls(
            seq=seq,
            start=start,
            tokens=seq.tokens[start : start + count],
            is_sampled=is_sampled,
            num_scored=seq.num_unscored(start, start + count) if seq.is_scored else 0,
            return_probs=is_sampled and return_probs,
        )

    @property
    def num_outputs(self) -> int:
        """Positions whose logits are needed, sampled or scored: the last ones."""
        return self.num_scored + self.is_sampled + self.num_drafts

    @property
    def scored_tokens(self) -> list[int]:
        """The token of the prompt after each scored position."""
        after = self.start + len(self.tokens) - self.num_outputs + 1
        return self.seq.tokens[after : after + self.num_scored]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        """True for a generated token and its drafts, false for a prompt or after preemption."""
        is_past_prompt = self.start >= self.seq.num_prompt
        return self.is_sampled and is_past_prompt and len(self.tokens) == 1 + self.num_drafts


class SampledTokens(NamedTuple):
    """New tokens of one chunk: the accepted draft tokens and the next token; empty during prefill.

    probs: the distribution that the last token was sampled from, if Chunk.return_probs is set, in a
    format private to the runner.
    scored: the logprobs of Chunk.scored_tokens.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    probs: Any = None
    scored: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Tokens of the KV cache: used by running sequences, kept by the prefix cache, and free."""

    used: int
    cached: int
    free: int


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """Threads that compute now, and when no other process needs a core."""

    now: int
    most: int


StepResult = list[SampledTokens]
EmbeddingArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbedSlice:
    """One slice of an embedding computation; the last slice carries the vectors.

    vectors: [inputs, width], not normalized.
    """

    num_tokens: int
    vectors: EmbeddingArray | None = None


class NoRoom(Exception):
    """The KV cache is full, even after evicting all cached prefixes."""


class StepFailed(Exception):
    """A step could not be computed; the model's state is lost and the engine must exit."""


class ModelRunner(Protocol):
    """A loaded model.

    All calls come from one thread. While a step is in flight, only launch and collect may be
    called.
    """

    limits: Limits

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """Allocate KV cache for all tokens of `seq`; returns how many of them are already cached.

        At least one token is left to compute. More may come from a store: see TieredRunner. Raises
        NoRoom if fewer than `spare` tokens of the KV cache would stay free or evictable, or if
        others use all places for adapters; LoadFailed if its adapter cannot be loaded.
        """
        ...

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        """Return how many leading tokens are in the prefix cache. Allocates and evicts nothing."""
        ...

    def grow(self, seq: Sequence, n: int) -> bool:
        """Allocate KV cache for n tokens beyond the computed ones; returns False if it is full."""
        ...

    def launch(self, chunks: Seq[Chunk]) -> Any:
        """Start a step and return a ticket for collect. The chunks must respect the limits.

        Their sequences have the same adapters.
        Tokens ruled out by Sequence.banned_tokens or by the grammar are never sampled.
        """
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Wait for a step; returns one SampledTokens per chunk, in order.

        Raises NoRoom or StepFailed.
        """
        ...

    def rewind(self, seq: Sequence, length: int) -> None:
        """Truncate the cached tokens of `seq` to `length`."""
        ...

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """Free the KV cache of `seq`. keep: leave its computed tokens in the prefix cache."""
        ...

    def usage(self) -> PoolUsage:
        """Return the current usage of the KV cache."""
        ...

    def close(self) -> None:
        """Free all resources. No other call may follow."""
        ...


@runtime_checkable
class AsyncRunner(Protocol):
    """Interface of a ModelRunner that launches steps ahead (Limits.runs_ahead)."""

    @property
    def is_warming_up(self) -> bool:
        """True if the last step took longer than later ones of its size will."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work. Raises StepFailed."""
        ...

    def prepare_while_idle(self) -> bool:
        """Do one short piece of work that makes later steps faster; returns False if there is none.

        Called while no request is queued or running.
        """
        ...


@runtime_checkable
class TieredRunner(Protocol):
    """Interface of a ModelRunner that loads prefixes from a PrefixStore and saves them there."""

    def is_loading(self, seq: Sequence) -> bool:
        """True if stored tokens of an admitted sequence are left to load.

        Until then, no chunk of it may be launched; it may be released.
        """
        ...

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        """Load a block for a sequence, and more until a time (monotonic seconds).

        Returns how many of its leading tokens are in the KV cache now.
        """
        ...

    def save_next_block(self) -> bool:
        """Save one block of a cached prefix that is not stored, or start to.

        Returns False if there is none, or if running requests would have to wait.
        """
        ...


@runtime_checkable
class ThreadedRunner(Protocol):
    """Interface of a ModelRunner that computes with threads on the processor."""

    def threads(self) -> ThreadUsage:
        """Return the number of threads of the last step."""
        ...


@runtime_checkable
class AdapterRunner(Protocol):
    """Interface of a ModelRunner that computes with LoRA adapters."""

    def adapters(self) -> tuple[AdapterStats, ...]:
        """The adapters in memory, the latest used last."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """Interface of a ModelRunner that can compute embeddings."""

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        """Compute embeddings of inputs of at most max_len tokens each, in slices.

        max_tokens: returns the size of the next slice in tokens; long inputs are split if the model
        allows it.

        Other steps may run between slices, but none may be in flight when the next slice is
        requested. The KV cache in use is freed when the generator ends or is closed.
        Raises NoRoom (first slice only), StepFailed or LocalgenError.
        """
        ...
