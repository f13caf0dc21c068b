"""Drafts by a smaller model on a runner of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from localgen.backends.engine.speculation.acceptance import Acceptance, Common
from localgen.backends.engine.speculation.costs import StepCosts
from localgen.backends.engine.speculation.drafter import Proposal
from localgen.backends.runner.interface import Chunk, ModelRunner, NoRoom, Sampled, StepFailed
from localgen.backends.runner.sequence import Sequence, State, common_prefix
from localgen.backends.types import BASE_SAMPLING, SamplingParams

# a sequence is drafted for once no more than this of it is new to the draft model
_NEARLY = 64
# tokens that are read at once, where nothing is known or more would take too long: many take less
# time each, but a piece takes no more than so many steps may, and is paid for by those after it
_LEAST_READ = 16
_PIECE_STEPS = 4
# before anything is known: three wrong ones at the beginning do not yet make a useless model
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
# it knows the language in one text nearly as well as in another
_OTHERS_COUNT = 12.0
_GREEDY = SamplingParams(temperature=0.0).with_defaults(BASE_SAMPLING)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Twin:
    """A sequence as the draft model has it. draws: drafts, rather than taking the likeliest.

    proposed: since the target's last step. drawn_from: what each of these was, if it was drawn.
    """

    seq: Sequence
    acceptance: Acceptance
    draws: bool
    proposed: list[int] = field(default_factory=list)
    drawn_from: list[Any] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether the draft model has it still."""
        return self.seq.state is State.RUNNING

    @property
    def behind(self) -> int:
        return self.seq.num_owed

    def clear(self) -> None:
        """Nothing is proposed."""
        self.proposed, self.drawn_from = [], []

    def take(self, sampled: Sampled) -> None:
        """The draft model goes on with this token."""
        (token,) = sampled.tokens
        self.proposed.append(token)
        self.seq.tokens.append(token)
        if self.draws:
            self.drawn_from.append(sampled.drawn_from)

    def follow(self, tokens: list[int], runner: ModelRunner) -> None:
        """Become this text; what the cache holds of another one is cut off."""
        own = self.seq
        if own.tokens == tokens:
            return
        # one token is left to compute: its logits start the drafts
        kept = min(common_prefix(own.tokens, tokens), own.num_computed, len(tokens) - 1)
        own.tokens[:] = tokens
        if kept < own.num_computed:
            own.num_computed = kept
            runner.rewind(own, kept)


class ModelDrafter:
    """Drafts of a model with the target's vocabulary, for many sequences in each step.

    They are drawn where the sequence lets them be and both runners are stochastic, with the
    sequence's own settings; greedy otherwise.

    vocab: ids from here on are padding in one of both vocabularies: nobody drafts them, and a
    sequence that has one is not drafted for. Nor is one for which the draft model has no room.
    Should the draft model fail, it drafts no more; the target goes on.
    """

    must_be_tried = True

    def __init__(
        self,
        runner: ModelRunner,
        name: str,
        *,
        vocab: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._vocab = vocab
        self._runner, self._clock = runner, clock
        self._twins: dict[Sequence, _Twin] = {}
        # of greedy ones, and of those that are drawn
        self._common = Common((_PRIOR, _PRIOR), weight=_PRIOR_WEIGHT, counts=_OTHERS_COUNT)
        self._costs = StepCosts()
        self._at_once = min(_LEAST_READ, runner.limits.max_batch_tokens)
        self._to_read_ms = 0.0
        self._tried = False  # since the last step
        self._failure = ""

    def chances(self, seq: Sequence, most: int) -> list[float]:
        """As Drafter.chances."""
        twin = self._twin(seq)
        if twin is None or twin.behind > _NEARLY:
            return []
        room = self._runner.limits.max_len - len(seq.tokens)
        return [twin.acceptance.chance(twin.draws)] * max(0, min(most, room))

    @property
    def failure(self) -> str:
        """As Drafter.failure."""
        return self._failure

    def draft_ms(self, sequences: int) -> float:
        """As Drafter.draft_ms: a step of the draft model; 0: not known yet."""
        return self._costs.ms(sequences) or 0.0

    def usual_chance(self) -> float:
        """As Drafter.usual_chance."""
        if self._failure:
            return 0.0
        return max((self._common.chance(twin.draws) for twin in self._behind()), default=0.0)

    def catch_up(self, most_ms: float) -> None:
        """Read on in the texts that are new to the draft model, that long in the mean of several
        calls."""
        self._costs.pass_by(keep_smallest=False)
        if not self._tried:
            self._common.rest()
        self._tried = False
        self._to_read_ms = min(self._to_read_ms + most_ms, most_ms)
        behind = self._behind()
        if not behind or self._failure or not most_ms or self._to_read_ms < 0:
            return
        twin = min(behind, key=lambda twin: twin.behind)
        started_s = self._clock()
        self._compute([(twin, min(self._at_once, twin.behind - 1))], samples=False)
        took_ms = (self._clock() - started_s) * 1e3
        # a piece that something else delayed is not paid for to the end
        self._to_read_ms = max(self._to_read_ms - took_ms, -_PIECE_STEPS * most_ms)
        if took_ms < _PIECE_STEPS * most_ms / 2:
            self._at_once = min(2 * self._at_once, self._runner.limits.max_batch_tokens)
        elif took_ms > _PIECE_STEPS * most_ms:
            self._at_once = max(_LEAST_READ, self._at_once // 2)

    def _behind(self) -> list[_Twin]:
        """Texts that the draft model has to read before it can draft for them."""
        return [t for t in self._twins.values() if t.is_there and t.behind > _NEARLY]

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        """As Drafter.propose."""
        left = {self._twins[seq]: count for seq, count in wanted if seq in self._twins}
        for twin in left:
            twin.clear()
        while left and not self._failure:
            for group in self._groups(left):
                for twin, sampled in self._compute(group, samples=True):
                    if self._is_padding(sampled.tokens):
                        left[twin] = 0
                        continue
                    twin.take(sampled)
                    left[twin] -= 1
                    if twin.proposed[-1] in twin.seq.stop_ids:
                        left[twin] = 0
            left = {t: n for t, n in left.items() if n and t.is_there}
        found = (self._twins.get(seq) for seq, _ in wanted)
        return [
            Proposal([]) if twin is None else Proposal(list(twin.proposed), tuple(twin.drawn_from))
            for twin in found
        ]

    def learn(self, seq: Sequence, came: Seq[int]) -> None:
        """As Drafter.learn."""
        twin = self._twins.get(seq)
        if twin is None:
            return
        if twin.proposed:
            self._tried = True
        else:
            twin.acceptance.rest(len(came))
        for draft, token in zip(twin.proposed, came, strict=False):
            twin.acceptance.add(twin.draws, draft == token)
            if draft != token:
                break
        twin.clear()

    def forget(self, seq: Sequence) -> None:
        """As Drafter.forget; what the draft model has read may serve as a prefix."""
        twin = self._twins.pop(seq, None)
        if twin is not None and twin.is_there and not self._failure:
            self._release(twin, keep=True)

    def close(self) -> None:
        """As Drafter.close."""
        for seq in list(self._twins):
            self.forget(seq)
        self._runner.close()

    def _twin(self, seq: Sequence) -> _Twin | None:
        """The sequence in the draft model, as it is now; None: there is no room for it."""
        twin = self._twins.get(seq)
        if self._failure or len(seq.tokens) >= self._runner.limits.max_len:
            return None
        if twin is not None:
            if not twin.is_there:
                return None
            twin.follow(seq.tokens, self._runner)
            if self._is_padding(twin.seq.tokens[twin.seq.num_computed :]):
                self._release(twin, keep=False)
                return None
            return twin
        if sum(t.is_there for t in self._twins.values()) >= self._runner.limits.max_seqs:
            return None
        if self._is_padding(seq.tokens):
            return None
        most = self._runner.limits.max_len
        draws = seq.stochastic and self._runner.limits.stochastic
        own = Sequence(
            id=f"draft of {seq.id}",
            tokens=list(seq.tokens),
            num_prompt=len(seq.tokens),
            params=_drawing(seq.params) if draws else _GREEDY,
            ctx=most,
            limit=most,
            stop_ids=seq.stop_ids,
        )
        try:
            own.num_computed = self._runner.admit(own, spare=0)
        except NoRoom:
            return None
        own.state = State.RUNNING
        twin = self._twins[seq] = _Twin(own, Acceptance(self._common), draws)
        return twin

    def _is_padding(self, tokens: Seq[int]) -> bool:
        return self._vocab is not None and max(tokens, default=0) >= self._vocab

    def _groups(self, left: dict[_Twin, int]) -> list[list[tuple[_Twin, int]]]:
        """All that is owed, in steps that the runner can take."""
        limits = self._runner.limits
        groups: list[list[tuple[_Twin, int]]] = [[]]
        for twin in left:
            planned = sum(count for _, count in groups[-1])
            full = len(groups[-1]) >= limits.max_outputs
            if full or planned + twin.behind > limits.max_batch_tokens:
                groups.append([])
            groups[-1].append((twin, min(twin.behind, limits.max_batch_tokens)))
        return [group for group in groups if group]

    def _compute(
        self, group: list[tuple[_Twin, int]], *, samples: bool
    ) -> list[tuple[_Twin, Sampled]]:
        """A step of the draft model; what it says for each sequence, if it is to."""
        if self._failure:
            return []
        group = [(twin, count) for twin, count in group if self._grown(twin, count)]
        chunks = [
            Chunk(
                seq=twin.seq,
                start=twin.seq.num_computed,
                tokens=twin.seq.tokens[twin.seq.num_computed : twin.seq.num_computed + count],
                samples=samples and count == twin.behind,
                shows=twin.draws and samples and count == twin.behind,
            )
            for twin, count in group
        ]
        if not chunks:
            return []
        started_s = self._clock()
        try:
            result = self._runner.collect(self._runner.launch(chunks))
        except NoRoom:
            for twin, _ in group:
                self._release(twin, keep=False)
            return []
        except StepFailed as error:
            _log.error("%s drafts no more: %s", self.name, error)
            self._failure = f"failed: {error}"
            return []
        ms = (self._clock() - started_s) * 1e3
        if samples and sum(map(len, chunks)) <= 2 * len(chunks):
            self._costs.observe(len(chunks), ms)
        said = []
        for (twin, count), sampled in zip(group, result, strict=True):
            twin.seq.num_computed += count
            if sampled.tokens:
                said.append((twin, sampled))
        return said

    def _grown(self, twin: _Twin, count: int) -> bool:
        """Room for what is to be computed; without it the sequence leaves the draft model."""
        if self._runner.grow(twin.seq, count):
            return True
        self._release(twin, keep=False)
        return False

    def _release(self, twin: _Twin, *, keep: bool) -> None:
        self._runner.release(twin.seq, keep=keep)
        twin.seq.state = State.ENDED
        if not keep:
            twin.clear()


def _drawing(params: SamplingParams) -> SamplingParams:
    """How to draw drafts for such a request: as it does, with noise of its own, since whether a
    draft is kept must not depend on how it came about."""
    return replace(params, seed=~(params.seed or 0), min_tokens=0, logprobs=None)
