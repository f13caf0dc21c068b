"""What one request has computed and still owes. Only the scheduler changes a Sequence."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.grammar import GrammarMatcher
from localgen.backends.text.response_parser import ResponseParser

_NO_TOKENS: frozenset[int] = frozenset()


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Sequence:
    """A request as tokens: the prompt, then what was generated.

    tokens: prompt + answer so far. num_computed: how many of them are in the KV cache. drafts:
    proposed continuations of `tokens`, verified with the next step, then cleared. draft_probs: what
    each of them was drawn from; empty: they are points. can_sample_drafts: whether drafts for it
    may be drawn, so that its text depends on more than its seed. used_sampled_drafts: whether there
    were any such. num_drafted, num_accepted: how many there were of them, and how many were right.
    params: no sampling field is None. stop_ids: token ids that end the answer. ctx: the context it
    runs under; max_len: most tokens it may hold, at most ctx. matcher: the grammar that the answer
    is held to; the runner moves it on. response_parser: tells thoughts and calls from content;
    None: all is content. notes: what its user should know from the start. Times as in
    backends/types.py. cached_ms: what taking num_cached tokens from the cache took; first_step_ms:
    the step that gave the first token.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    ctx: int
    max_len: int
    stop_ids: frozenset[int] = frozenset()
    client: str = ""
    priority: int = 0
    arrived_s: float = 0.0
    template_ms: float = 0.0
    state: SequenceState = SequenceState.QUEUED
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_probs: Seq[Any] = ()
    can_sample_drafts: bool = False
    used_sampled_drafts: bool = False
    num_drafted: int = 0
    num_accepted: int = 0
    matcher: GrammarMatcher | None = None
    response_parser: ResponseParser | None = None
    notes: tuple[str, ...] = ()
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_ms: float = 0.0
    first_step_ms: float = 0.0

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    def banned_tokens(self, num_ahead: int = 0) -> frozenset[int]:
        """Tokens that would end the answer too early, once it has `num_ahead` tokens more."""
        early = self.num_generated + num_ahead < self.params.min_tokens
        return self.stop_ids if early else _NO_TOKENS

    @property
    def is_decoding(self) -> bool:
        """Whether the answer has begun and nothing else is owed than its last token."""
        return self.num_generated > 0 and self.num_uncomputed == 1


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that two lists share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # invariant: a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
