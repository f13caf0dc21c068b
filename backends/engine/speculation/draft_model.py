"""Draft-model drafter: a smaller model with the target's vocabulary, on a runner of its own."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median

from localgen.backends.engine.speculation.drafter import DecayedRatio, Drafter, DraftProposal
from localgen.backends.runner.interface import (
    AsyncRunner,
    Chunk,
    ModelRunner,
    NoRoom,
    SampledTokens,
    StepFailed,
)
from localgen.backends.runner.sequence import Sequence, SequenceState, common_prefix_len
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

# a sequence with more uncomputed tokens than this is prefilled before it gets drafts
_MAX_UNCOMPUTED = 64
# initial acceptance, and its weight in drafts
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _DraftSequence:
    """The draft model's copy of a sequence; seq.state is RUNNING while its cache holds it.

    drafts: at the end of seq.tokens, since the target's last step.
    """

    seq: Sequence
    acceptance: DecayedRatio
    drafts: DraftProposal = field(default_factory=DraftProposal)

    @property
    def is_active(self) -> bool:
        return self.seq.state is SequenceState.RUNNING


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
        self._async_runner = runner if isinstance(runner, AsyncRunner) else None
        self._vocab_size = shared_vocab_size
        self._copies: dict[Sequence, _DraftSequence] = {}
        # of greedy and of sampled drafts
        self._shared = [DecayedRatio(_PRIOR, _PRIOR_WEIGHT) for _ in range(2)]
        self._round_ms: deque[float] = deque(maxlen=5)

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        copy = None if self.failure else self._synced_copy(seq)
        room = self._runner.limits.max_len - len(seq.tokens)
        return [copy.acceptance.value] * min(max_drafts, room) if copy else []

    def draft_ms(self) -> float:
        return median(self._round_ms) if self._round_ms else 0.0

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        remaining = {self._copies[seq]: count for seq, count in requests.items()}
        # the policy wanted drafts for all: some alone would delay the others
        if self._prefill(remaining, max_prefill_tokens):
            while (batch := self._batch(remaining)) and not self.failure:
                for copy, sampled in self._compute(batch):
                    remaining[copy] -= 1
                    is_padding = self._has_padding(sampled.tokens)
                    if not is_padding:
                        copy.drafts.tokens.extend(sampled.tokens)
                        copy.seq.tokens.extend(sampled.tokens)
                        if copy.seq.can_sample_drafts:
                            copy.drafts.draft_probs.append(sampled.probs)
                    if is_padding or sampled.tokens[-1] in copy.seq.stop_ids:
                        remaining[copy] = 0
                remaining = {copy: n for copy, n in remaining.items() if n and copy.is_active}
        return {seq: own for seq in requests if (own := self._copies[seq].drafts).tokens}

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        if copy := self._copies.get(seq):
            for draft, token in zip(copy.drafts.tokens, new_tokens, strict=False):
                copy.acceptance.add(draft == token)
                if draft != token:
                    break

    def release(self, seq: Sequence) -> None:
        copy = self._copies.pop(seq, None)
        if copy and copy.is_active and not self.failure:
            self._evict(copy, keep=True)

    def prepare_while_idle(self) -> bool:
        runner = None if self.failure else self._async_runner
        return runner is not None and runner.prepare_while_idle()

    def close(self) -> None:
        self._runner.close()

    def _synced_copy(self, seq: Sequence) -> _DraftSequence | None:
        """Return the copy, with the sequence's current tokens; None if there is no room for it."""
        copy = self._copies.get(seq) or self._admit(seq)
        if copy is None or not copy.is_active:
            return None
        own, known = copy.seq, len(copy.seq.tokens) - len(copy.drafts.tokens)
        new, copy.drafts = seq.tokens[known:], DraftProposal()
        if self._has_padding(new):
            self._evict(copy)
            return None
        # one token is left to compute: its logits start the drafts
        kept = min(known + common_prefix_len(own.tokens[known:], new), len(seq.tokens) - 1)
        own.tokens[known:] = new
        if kept < own.num_computed:  # remove rejected drafts from the KV cache
            own.num_computed = kept
            self._runner.rewind(own, kept)
        return copy

    def _admit(self, seq: Sequence) -> _DraftSequence | None:
        limits = self._runner.limits
        num_active = sum(copy.is_active for copy in self._copies.values())
        is_too_long = len(seq.tokens) >= limits.max_len
        if num_active >= limits.max_seqs or is_too_long or self._has_padding(seq.tokens):
            return None
        is_sampled = seq.can_sample_drafts and limits.can_sample_drafts
        own = Sequence(
            id=f"draft of {seq.id}",
            tokens=list(seq.tokens),
            num_prompt=len(seq.tokens),
            # an independent seed: acceptance must not depend on the noise that sampled the draft
            params=replace(seq.params, seed=~(seq.params.seed or 0), min_tokens=0, logprobs=None)
            if is_sampled
            else _GREEDY,
            ctx=limits.max_len,
            max_len=limits.max_len,
            stop_ids=seq.stop_ids,
            cache_salt=seq.cache_salt,
            can_sample_drafts=is_sampled,
        )
        try:
            own.num_computed = self._runner.admit(own, spare=0)
        except NoRoom:
            return None
        own.state = SequenceState.RUNNING
        rate = DecayedRatio(decay=DecayedRatio.RECENT, shared=self._shared[is_sampled])
        self._copies[seq] = _DraftSequence(own, rate)
        return self._copies[seq]

    def _has_padding(self, tokens: Seq[int]) -> bool:
        return self._vocab_size is not None and max(tokens, default=0) >= self._vocab_size

    def _prefill(self, copies: Iterable[_DraftSequence], max_tokens: int) -> bool:
        """Compute a piece of the shortest unread prompt; return whether all prompts are read."""
        batch_tokens = self._runner.limits.max_batch_tokens
        limit = min(_MAX_UNCOMPUTED, batch_tokens)
        unread = [copy for copy in copies if copy.seq.num_uncomputed > limit]
        if unread:
            shortest = min(unread, key=lambda copy: copy.seq.num_uncomputed)
            count = min(max_tokens, batch_tokens, shortest.seq.num_uncomputed - 1)
            self._compute({shortest: count})
        return all(copy.seq.num_uncomputed <= limit for copy in unread)

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
        self, batch: dict[_DraftSequence, int]
    ) -> list[tuple[_DraftSequence, SampledTokens]]:
        """Run a step of the draft model; return the sampled tokens. batch: tokens to compute."""
        for copy in [c for c, count in batch.items() if not self._runner.grow(c.seq, count)]:
            self._evict(copy)
            del batch[copy]
        if not batch:
            return []
        chunks = [
            Chunk.of_uncomputed(copy.seq, count, return_probs=copy.seq.can_sample_drafts)
            for copy, count in batch.items()
        ]
        started_s = self._clock()
        try:
            result = self._runner.collect(self._runner.launch(chunks))
        except NoRoom:
            for copy in batch:
                self._evict(copy)
            return []
        except StepFailed as error:
            _log.error("%s is disabled: %s", self.name, error)
            self.failure = f"failed: {error}"
            return []
        is_typical = self._async_runner is None or not self._async_runner.is_warming_up
        if is_typical and sum(batch.values()) <= 2 * len(batch):
            self._round_ms.append((self._clock() - started_s) * 1e3)
        for copy, count in batch.items():
            copy.seq.num_computed += count
        return list(zip(batch, result, strict=True))

    def _evict(self, copy: _DraftSequence, *, keep: bool = False) -> None:
        self._runner.release(copy.seq, keep=keep)
        copy.seq.state, copy.drafts = SequenceState.ENDED, DraftProposal()
