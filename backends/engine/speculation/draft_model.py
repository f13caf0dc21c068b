"""Drafts by a smaller model on a runner of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from localgen.backends.engine.speculation.acceptance import AcceptanceEstimator, SharedPrior
from localgen.backends.engine.speculation.costs import StepCosts
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.runner.interface import Chunk, ModelRunner, NoRoom, SampledTokens, StepFailed
from localgen.backends.runner.sequence import Sequence, SequenceState, common_prefix_len
from localgen.backends.types import BASE_SAMPLING, SamplingParams

# a sequence is drafted for once no more than this of it is new to the draft model
_MAX_UNCOMPUTED = 64
# tokens that are read at once, where nothing is known or more would take too long: many take less
# time each, but a piece takes no more than so many steps may, and is paid for by those after it
_MIN_PREFILL_TOKENS = 16
_MAX_PREFILL_STEPS = 4
# before anything is known: three wrong ones at the beginning do not yet make a useless model
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
# it knows the language in one text nearly as well as in another
_SHARED_WEIGHT = 12.0
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _DraftSequence:
    """A sequence as the draft model has it. is_sampled: drafts, rather than taking the likeliest.

    draft_tokens: since the target's last step. draft_probs: what each of these was, if it was
    drawn.
    """

    seq: Sequence
    acceptance: AcceptanceEstimator
    is_sampled: bool
    draft_tokens: list[int] = field(default_factory=list)
    draft_probs: list[Any] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        """Whether the draft model has it still."""
        return self.seq.state is SequenceState.RUNNING

    @property
    def num_uncomputed(self) -> int:
        return self.seq.num_uncomputed

    def clear_drafts(self) -> None:
        """Nothing is proposed."""
        self.draft_tokens, self.draft_probs = [], []

    def append(self, sampled: SampledTokens) -> None:
        """The draft model goes on with this token."""
        (token,) = sampled.tokens
        self.draft_tokens.append(token)
        self.seq.tokens.append(token)
        if self.is_sampled:
            self.draft_probs.append(sampled.probs)

    def sync_to(self, tokens: list[int], runner: ModelRunner) -> None:
        """Become this text; what the cache holds of another one is cut off."""
        own = self.seq
        if own.tokens == tokens:
            return
        # one token is left to compute: its logits start the drafts
        kept = min(common_prefix_len(own.tokens, tokens), own.num_computed, len(tokens) - 1)
        own.tokens[:] = tokens
        if kept < own.num_computed:
            own.num_computed = kept
            runner.rewind(own, kept)


class ModelDrafter:
    """Drafts of a model with the target's vocabulary, for many sequences in each step.

    They are drawn where the sequence lets them be and both runners are stochastic, with the
    sequence's own settings; greedy otherwise.

    shared_vocab_size: ids from here on are padding in one of both vocabularies: nobody drafts them,
    and a sequence that has one is not drafted for. Nor is one for which the draft model has no
    room. Should the draft model fail, it drafts no more; the target goes on.
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
        self.name = name
        self._shared_vocab_size = shared_vocab_size
        self._runner, self._clock = runner, clock
        self._draft_sequences: dict[Sequence, _DraftSequence] = {}
        # of greedy ones, and of those that are drawn
        self._shared_prior = SharedPrior(
            (_PRIOR, _PRIOR), prior_weight=_PRIOR_WEIGHT, weight=_SHARED_WEIGHT
        )
        self._costs = StepCosts()
        self._prefill_chunk_tokens = min(_MIN_PREFILL_TOKENS, runner.limits.max_batch_tokens)
        self._prefill_budget_ms = 0.0
        self._has_probed = False  # since the last step
        self._failure = ""

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        """As Drafter.acceptance_probs."""
        twin = self._synced(seq)
        if twin is None or twin.num_uncomputed > _MAX_UNCOMPUTED:
            return []
        room = self._runner.limits.max_len - len(seq.tokens)
        return [twin.acceptance.probability(twin.is_sampled)] * max(0, min(max_drafts, room))

    @property
    def failure(self) -> str:
        """As Drafter.failure."""
        return self._failure

    def draft_ms(self, num_sequences: int) -> float:
        """As Drafter.draft_ms: a step of the draft model; 0: not known yet."""
        return self._costs.ms(num_sequences) or 0.0

    def default_acceptance(self) -> float:
        """As Drafter.default_acceptance."""
        if self._failure:
            return 0.0
        return max(
            (self._shared_prior.probability(twin.is_sampled) for twin in self._needing_prefill()),
            default=0.0,
        )

    def prefill(self, budget_ms: float) -> None:
        """Read on in the texts that are new to the draft model, that long in the mean of several
        calls."""
        self._costs.pass_by(keep_smallest=False)
        if not self._has_probed:
            self._shared_prior.decay()
        self._has_probed = False
        self._prefill_budget_ms = min(self._prefill_budget_ms + budget_ms, budget_ms)
        behind = self._needing_prefill()
        if not behind or self._failure or not budget_ms or self._prefill_budget_ms < 0:
            return
        twin = min(behind, key=lambda twin: twin.num_uncomputed)
        started_s = self._clock()
        self._compute(
            [(twin, min(self._prefill_chunk_tokens, twin.num_uncomputed - 1))], sample=False
        )
        took_ms = (self._clock() - started_s) * 1e3
        # a piece that something else delayed is not paid for to the end
        self._prefill_budget_ms = max(
            self._prefill_budget_ms - took_ms, -_MAX_PREFILL_STEPS * budget_ms
        )
        if took_ms < _MAX_PREFILL_STEPS * budget_ms / 2:
            self._prefill_chunk_tokens = min(
                2 * self._prefill_chunk_tokens, self._runner.limits.max_batch_tokens
            )
        elif took_ms > _MAX_PREFILL_STEPS * budget_ms:
            self._prefill_chunk_tokens = max(_MIN_PREFILL_TOKENS, self._prefill_chunk_tokens // 2)

    def _needing_prefill(self) -> list[_DraftSequence]:
        """Texts that the draft model has to read before it can draft for them."""
        return [
            t
            for t in self._draft_sequences.values()
            if t.is_active and t.num_uncomputed > _MAX_UNCOMPUTED
        ]

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        """As Drafter.propose."""
        left = {
            self._draft_sequences[seq]: count
            for seq, count in requests
            if seq in self._draft_sequences
        }
        for twin in left:
            twin.clear_drafts()
        while left and not self._failure:
            for group in self._batches(left):
                for twin, sampled in self._compute(group, sample=True):
                    if self._is_padding(sampled.tokens):
                        left[twin] = 0
                        continue
                    twin.append(sampled)
                    left[twin] -= 1
                    if twin.draft_tokens[-1] in twin.seq.stop_ids:
                        left[twin] = 0
            left = {t: n for t, n in left.items() if n and t.is_active}
        found = (self._draft_sequences.get(seq) for seq, _ in requests)
        return [
            DraftProposal([])
            if twin is None
            else DraftProposal(list(twin.draft_tokens), tuple(twin.draft_probs))
            for twin in found
        ]

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """As Drafter.observe."""
        twin = self._draft_sequences.get(seq)
        if twin is None:
            return
        if twin.draft_tokens:
            self._has_probed = True
        else:
            twin.acceptance.decay(len(new_tokens))
        for draft, token in zip(twin.draft_tokens, new_tokens, strict=False):
            twin.acceptance.add(twin.is_sampled, draft == token)
            if draft != token:
                break
        twin.clear_drafts()

    def release(self, seq: Sequence) -> None:
        """As Drafter.release; what the draft model has read may serve as a prefix."""
        twin = self._draft_sequences.pop(seq, None)
        if twin is not None and twin.is_active and not self._failure:
            self._release(twin, keep=True)

    def close(self) -> None:
        """As Drafter.close."""
        for seq in list(self._draft_sequences):
            self.release(seq)
        self._runner.close()

    def _synced(self, seq: Sequence) -> _DraftSequence | None:
        """The sequence in the draft model, as it is now; None: there is no room for it."""
        twin = self._draft_sequences.get(seq)
        if self._failure or len(seq.tokens) >= self._runner.limits.max_len:
            return None
        if twin is not None:
            if not twin.is_active:
                return None
            twin.sync_to(seq.tokens, self._runner)
            if self._is_padding(twin.seq.tokens[twin.seq.num_computed :]):
                self._release(twin, keep=False)
                return None
            return twin
        if sum(t.is_active for t in self._draft_sequences.values()) >= self._runner.limits.max_seqs:
            return None
        if self._is_padding(seq.tokens):
            return None
        most = self._runner.limits.max_len
        draws = seq.can_sample_drafts and self._runner.limits.can_sample_drafts
        own = Sequence(
            id=f"draft of {seq.id}",
            tokens=list(seq.tokens),
            num_prompt=len(seq.tokens),
            params=_draft_sampling_params(seq.params) if draws else _GREEDY,
            ctx=most,
            max_len=most,
            stop_ids=seq.stop_ids,
        )
        try:
            own.num_computed = self._runner.admit(own, spare=0)
        except NoRoom:
            return None
        own.state = SequenceState.RUNNING
        twin = self._draft_sequences[seq] = _DraftSequence(
            own, AcceptanceEstimator(self._shared_prior), draws
        )
        return twin

    def _is_padding(self, tokens: Seq[int]) -> bool:
        return (
            self._shared_vocab_size is not None
            and max(tokens, default=0) >= self._shared_vocab_size
        )

    def _batches(
        self, remaining: dict[_DraftSequence, int]
    ) -> list[list[tuple[_DraftSequence, int]]]:
        """All that is owed, in steps that the runner can take."""
        limits = self._runner.limits
        groups: list[list[tuple[_DraftSequence, int]]] = [[]]
        for twin in remaining:
            planned = sum(count for _, count in groups[-1])
            full = len(groups[-1]) >= limits.max_outputs
            if full or planned + twin.num_uncomputed > limits.max_batch_tokens:
                groups.append([])
            groups[-1].append((twin, min(twin.num_uncomputed, limits.max_batch_tokens)))
        return [group for group in groups if group]

    def _compute(
        self, batch: list[tuple[_DraftSequence, int]], *, sample: bool
    ) -> list[tuple[_DraftSequence, SampledTokens]]:
        """A step of the draft model; what it says for each sequence, if it is to."""
        if self._failure:
            return []
        batch = [(twin, count) for twin, count in batch if self._reserve(twin, count)]
        chunks = [
            Chunk(
                seq=twin.seq,
                start=twin.seq.num_computed,
                tokens=twin.seq.tokens[twin.seq.num_computed : twin.seq.num_computed + count],
                is_sampled=sample and count == twin.num_uncomputed,
                return_probs=twin.is_sampled and sample and count == twin.num_uncomputed,
            )
            for twin, count in batch
        ]
        if not chunks:
            return []
        started_s = self._clock()
        try:
            result = self._runner.collect(self._runner.launch(chunks))
        except NoRoom:
            for twin, _ in batch:
                self._release(twin, keep=False)
            return []
        except StepFailed as error:
            _log.error("%s drafts no more: %s", self.name, error)
            self._failure = f"failed: {error}"
            return []
        ms = (self._clock() - started_s) * 1e3
        if sample and sum(map(len, chunks)) <= 2 * len(chunks):
            self._costs.observe(len(chunks), ms)
        said = []
        for (twin, count), sampled in zip(batch, result, strict=True):
            twin.seq.num_computed += count
            if sampled.tokens:
                said.append((twin, sampled))
        return said

    def _reserve(self, twin: _DraftSequence, count: int) -> bool:
        """Room for what is to be computed; without it the sequence leaves the draft model."""
        if self._runner.grow(twin.seq, count):
            return True
        self._release(twin, keep=False)
        return False

    def _release(self, twin: _DraftSequence, *, keep: bool) -> None:
        self._runner.release(twin.seq, keep=keep)
        twin.seq.state = SequenceState.ENDED
        if not keep:
            twin.clear_drafts()


def _draft_sampling_params(params: SamplingParams) -> SamplingParams:
    """How to draw drafts for such a request: as it does, with noise of its own, since whether a
    draft is kept must not depend on how it came about."""
    return replace(params, seed=~(params.seed or 0), min_tokens=0, logprobs=None)
