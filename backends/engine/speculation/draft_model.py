"""Draft-model drafter: a smaller model with the target's vocabulary, on a runner of its own."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.stats import AcceptanceEstimator, AcceptanceRate
from localgen.backends.runner.interface import Chunk, ModelRunner, NoRoom, SampledTokens, StepFailed
from localgen.backends.runner.sequence import Sequence, SequenceState, common_prefix_len
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

# a sequence with more uncomputed tokens than this is prefilled before it gets drafts
_MAX_UNCOMPUTED = 64
# initial acceptance, its weight in drafts, and the weight of other sequences' acceptance
_PRIOR, _PRIOR_WEIGHT, _SHARED_WEIGHT = 0.6, 4.0, 12.0
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _DraftSequence:
    """The draft model's copy of a sequence; seq.state is RUNNING while its cache holds it.

    is_sampled: drafts are sampled, not greedy. tokens, probs: drafts since the target's last step.
    """

    seq: Sequence
    acceptance: AcceptanceEstimator
    is_sampled: bool
    tokens: list[int] = field(default_factory=list)
    probs: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Drop the drafts."""
        self.tokens, self.probs = [], []


class ModelDrafter(Drafter):
    """Drafts of a model, for many sequences in each step.

    Drafts are sampled with the sequence's settings where the sequence and both runners allow it,
    greedy otherwise. A sequence is left out if the draft model has no room for it, or if it
    has tokens from shared_vocab_size on, which are padding in one of the two vocabularies. If the
    draft model fails, it is disabled and the target continues.
    """

    needs_probing = True

    def __init__(
        self,
        runner: ModelRunner,
        name: str,
        *,
        shared_vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._runner, self._clock = name, runner, clock
        self._vocab_size = shared_vocab_size
        self._copies: dict[Sequence, _DraftSequence] = {}
        # of greedy and of sampled drafts
        self._shared = [AcceptanceRate(_PRIOR, _PRIOR_WEIGHT) for _ in range(2)]
        self._round_ms: deque[float] = deque(maxlen=5)

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        copy = self._synced_copy(seq)
        if copy is None:
            return []
        room = self._runner.limits.max_len - len(seq.tokens)
        return [copy.acceptance.probability(copy.is_sampled)] * max(0, min(max_drafts, room))

    def draft_ms(self) -> float:
        return median(self._round_ms) if self._round_ms else 0.0

    def propose(
        self, requests: Seq[tuple[Sequence, int]], max_prefill_tokens: int
    ) -> list[DraftProposal]:
        remaining = {self._copies[seq]: count for seq, count in requests}
        copies = list(remaining)
        for copy in copies:
            copy.clear()
        batch_tokens = self._runner.limits.max_batch_tokens
        limit = min(_MAX_UNCOMPUTED, batch_tokens)
        unprefilled = [copy for copy in copies if copy.seq.num_uncomputed > limit]
        if unprefilled:
            shortest = min(unprefilled, key=lambda copy: copy.seq.num_uncomputed)
            count = min(max_prefill_tokens, batch_tokens, shortest.seq.num_uncomputed - 1)
            self._compute({shortest: count}, sample=False)
        for copy in unprefilled:
            del remaining[copy]
        while (batch := self._batch(remaining)) and not self.failure:
            for copy, sampled in self._compute(batch, sample=True):
                remaining[copy] -= 1
                if self._has_padding(sampled.tokens):
                    remaining[copy] = 0
                    continue
                copy.tokens += sampled.tokens
                copy.seq.tokens += sampled.tokens
                if copy.is_sampled:
                    copy.probs.append(sampled.probs)
                if copy.tokens[-1] in copy.seq.stop_ids:
                    remaining[copy] = 0
            remaining = {copy: n for copy, n in remaining.items() if n and _is_active(copy)}
        return [DraftProposal(copy.tokens, tuple(copy.probs)) for copy in copies]

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        copy = self._copies.get(seq)
        if copy is None:
            return
        for draft, token in zip(copy.tokens, new_tokens, strict=False):
            copy.acceptance.add(copy.is_sampled, draft == token)
            if draft != token:
                break
        copy.clear()

    def release(self, seq: Sequence) -> None:
        copy = self._copies.pop(seq, None)
        if copy is not None and _is_active(copy) and not self.failure:
            self._evict(copy, keep=True)

    def close(self) -> None:
        for seq in list(self._copies):
            self.release(seq)
        self._runner.close()

    def _synced_copy(self, seq: Sequence) -> _DraftSequence | None:
        """Return the copy, with the sequence's current tokens; None if there is no room for it."""
        if self.failure or len(seq.tokens) >= self._runner.limits.max_len:
            return None
        copy = self._copies.get(seq) or self._admit(seq)
        if copy is None or not _is_active(copy):
            return None
        own, tokens = copy.seq, seq.tokens
        if own.tokens != tokens:  # remove rejected drafts from the KV cache
            # one token is left to compute: its logits start the drafts
            kept = min(common_prefix_len(own.tokens, tokens), own.num_computed, len(tokens) - 1)
            own.tokens[:] = tokens
            if kept < own.num_computed:
                own.num_computed = kept
                self._runner.rewind(own, kept)
        if self._has_padding(tokens[own.num_computed :]):
            self._evict(copy, keep=False)
            return None
        return copy

    def _admit(self, seq: Sequence) -> _DraftSequence | None:
        limits = self._runner.limits
        if sum(map(_is_active, self._copies.values())) >= limits.max_seqs:
            return None
        if self._has_padding(seq.tokens):
            return None
        is_sampled = seq.can_sample_drafts and limits.can_sample_drafts
        own = Sequence(
            id=f"draft of {seq.id}",
            tokens=list(seq.tokens),
            num_prompt=len(seq.tokens),
            params=_draft_sampling_params(seq.params) if is_sampled else _GREEDY,
            ctx=limits.max_len,
            max_len=limits.max_len,
            stop_ids=seq.stop_ids,
            cache_salt=seq.cache_salt,
        )
        try:
            own.num_computed = self._runner.admit(own, spare=0)
        except NoRoom:
            return None
        own.state = SequenceState.RUNNING
        acceptance = AcceptanceEstimator(self._shared, weight=_SHARED_WEIGHT)
        copy = self._copies[seq] = _DraftSequence(own, acceptance, is_sampled)
        return copy

    def _has_padding(self, tokens: Seq[int]) -> bool:
        return self._vocab_size is not None and max(tokens, default=0) >= self._vocab_size

    def _batch(self, copies: Iterable[_DraftSequence]) -> dict[_DraftSequence, int]:
        """Number of uncomputed tokens, of as many copies as fit one step."""
        batch: dict[_DraftSequence, int] = {}
        limits, total = self._runner.limits, 0
        for copy in copies:
            count = copy.seq.num_uncomputed
            if len(batch) < limits.max_outputs and total + count <= limits.max_batch_tokens:
                batch[copy], total = count, total + count
        return batch

    def _compute(
        self, batch: dict[_DraftSequence, int], *, sample: bool
    ) -> list[tuple[_DraftSequence, SampledTokens]]:
        """Run a step of the draft model; return the sampled tokens. batch: tokens to compute."""
        for copy in [c for c, count in batch.items() if not self._runner.grow(c.seq, count)]:
            self._evict(copy, keep=False)
            del batch[copy]
        if not batch:
            return []
        chunks = [
            Chunk(
                seq=copy.seq,
                start=(start := copy.seq.num_computed),
                tokens=copy.seq.tokens[start : start + count],
                is_sampled=sample,
                return_probs=sample and copy.is_sampled,
            )
            for copy, count in batch.items()
        ]
        started_s = self._clock()
        try:
            result = self._runner.collect(self._runner.launch(chunks))
        except NoRoom:
            for copy in batch:
                self._evict(copy, keep=False)
            return []
        except StepFailed as error:
            _log.error("%s is disabled: %s", self.name, error)
            self.failure = f"failed: {error}"
            return []
        if sample and sum(batch.values()) <= 2 * len(batch):
            self._round_ms.append((self._clock() - started_s) * 1e3)
        for copy, count in batch.items():
            copy.seq.num_computed += count
        return list(zip(batch, result, strict=True)) if sample else []

    def _evict(self, copy: _DraftSequence, *, keep: bool) -> None:
        self._runner.release(copy.seq, keep=keep)
        copy.seq.state = SequenceState.ENDED
        copy.clear()


def _is_active(copy: _DraftSequence) -> bool:
    return copy.seq.state is SequenceState.RUNNING


def _draft_sampling_params(params: SamplingParams) -> SamplingParams:
    """The request's settings with an independent seed: acceptance must not depend on the noise that
    sampled the draft."""
    return replace(params, seed=~(params.seed or 0), min_tokens=0, logprobs=None)
