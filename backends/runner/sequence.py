"""The state of one request in the engine. Only the scheduler modifies a Sequence, and speculation
the statistics of its drafts."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.adapters import Adapters
from localgen.backends.prefix_break import FoundBreak
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.grammar import GrammarMatcher
from localgen.backends.text.response_parser import ResponseParser
from localgen.backends.types import (
    NO_LINE_LIMITS,
    LineLimits,
    PositionLogprobs,
    PromptChunks,
    RestoredTokens,
)

_NO_TOKENS: frozenset[int] = frozenset()


class SequenceState(enum.Enum):
    """Scheduling state of a sequence."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Sequence:
    """A request as token ids: the prompt followed by the generated tokens.

    tokens: prompt + answer so far.
    params: sampling parameters, with all defaults filled in.
    ctx: the context limit of the request.
    max_len: maximum number of tokens, at most ctx.
    stop_ids: token ids that end the answer.
    cache_salt: only sequences with the same salt share cached prefixes; see prefix_salt.
    adapters: LoRA adapters; only sequences with the same ones may be in one step.
    save_prefix: a PrefixStore may keep its tokens.
    chunks: of the prompt, see Request.
    num_computed: number of tokens whose KV is computed.
    num_cached: prompt tokens found in the prefix cache. restored: those of them that were no longer
    in the KV cache, but in a PrefixStore.
    drafts: draft tokens to verify in the next step, then cleared.
    draft_probs: the distribution each draft token was sampled from, or empty for greedy drafts.
    can_sample_drafts: draft tokens may be sampled; the text then depends on more than the seed.
    used_sampled_drafts: draft tokens were sampled.
    num_drafted, num_accepted: draft tokens verified and accepted.
    num_decode_steps, num_drafting_steps: steps after the first token, and those with drafts.
    decode_ms, plain_decode_ms: time of measured decode steps, and of plain ones for as many tokens.
    drafted_by: draft tokens by drafter.
    matcher: the grammar that constrains the answer; advanced by the runner.
    response_parser: separates reasoning and tool calls from content, or None if all text is
    content.
    echo: text of the prompt, returned before the answer, or None if it is not returned.
    line_limits: end the answer at a line.
    scored: logprobs of the prompt's tokens from the second on, as far as they are computed.
    notes: messages for the user.
    block_hashes: of the prompt, for Finished.
    prefix_break: where the prompt parts from an earlier one, not measured yet.
    num_earlier_cached: leading tokens of that earlier one in the prefix cache at admission.
    cached_ms: time to reuse num_cached tokens; first_step_ms: duration of the step that sampled the
    first token. Other times as in backends/types.py.
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
    cache_salt: str = ""
    adapters: Adapters = ()
    save_prefix: bool = True
    kv_peer: str = ""
    chunks: PromptChunks | None = None
    arrived_s: float = 0.0
    template_ms: float = 0.0
    state: SequenceState = SequenceState.QUEUED
    num_computed: int = 0
    num_cached: int = 0
    restored: tuple[RestoredTokens, ...] = ()
    num_preemptions: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_probs: Seq[Any] = ()
    can_sample_drafts: bool = False
    used_sampled_drafts: bool = False
    num_drafted: int = 0
    num_accepted: int = 0
    num_decode_steps: int = 0
    num_drafting_steps: int = 0
    decode_ms: float = 0.0
    plain_decode_ms: float = 0.0
    drafted_by: Counter[str] = field(default_factory=Counter)
    matcher: GrammarMatcher | None = None
    response_parser: ResponseParser | None = None
    echo: str | None = None
    block_hashes: tuple[int, ...] = ()
    line_limits: LineLimits = NO_LINE_LIMITS
    scored: list[PositionLogprobs] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    prefix_break: FoundBreak | None = None
    num_earlier_cached: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_ms: float = 0.0
    first_step_ms: float = 0.0

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must be computed before the next token can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.num_prompt

    def banned_tokens(self, num_ahead: int = 0) -> frozenset[int]:
        """Tokens that would end the answer before min_tokens, counting `num_ahead` more tokens."""
        early = self.num_generated + num_ahead < self.params.min_tokens
        return self.stop_ids if early else _NO_TOKENS

    @property
    def is_scored(self) -> bool:
        """True if logprobs of the prompt's tokens are requested."""
        return self.echo is not None and self.params.logprobs is not None

    def num_unscored(self, start: int, end: int) -> int:
        """Number of positions from start to end that a scored sequence still has to score.

        None was sampled before all are scored, so they are the last ones before a sampled one.
        """
        return max(0, min(end, self.num_prompt - 1) - max(start, len(self.scored)))

    @property
    def reusable_tokens(self) -> list[int]:
        """The leading tokens that may come from the prefix cache.

        One is left to compute, and each position that must be scored.
        """
        return self.tokens[: len(self.scored)] if self.must_score else self.tokens[:-1]

    @property
    def must_score(self) -> bool:
        """True if logprobs of the prompt's tokens are left to compute."""
        return self.is_scored and len(self.scored) < self.num_prompt - 1

    @property
    def is_decoding(self) -> bool:
        """True if only the last generated token is left to compute."""
        length = len(self.tokens)
        return length > self.num_prompt and length == self.num_computed + 1


def common_prefix_len(a: Seq[Any], b: Seq[Any]) -> int:
    """Number of leading tokens, or characters, that two of them share, by binary search."""
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
