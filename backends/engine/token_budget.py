"""Limit the prefill tokens of a step while other sequences are decoding."""

from __future__ import annotations

from localgen.backends.engine.background import MAX_SLOWDOWN, MAX_STEP_MS
from localgen.backends.engine.step_costs import StepCosts

MIN_PROMPT_TOKENS = 16
# a mixed step may take this many times its decode-only duration, even beyond the target:
# otherwise prefill would starve where decoding alone already exceeds the target
MIN_ALLOWED_SLOWDOWN = 3.0
_EWMA_WEIGHT = 0.3


class TokenBudget:
    """Keeps mixed steps near the inter-token latency target, using measured step times.

    Cost model: that of a decode step, plus token_ms for each prompt token. decode_costs: measured
    steps without prompts.
    """

    def __init__(self, max_tokens: int, itl_target_ms: float) -> None:
        self._max = max_tokens
        self._target_ms = itl_target_ms
        self.decode_costs = StepCosts()
        self._prompt_cost = _PromptTokenCost()

    def prompt_tokens(self, decode_tokens: int) -> int:
        """Return the most prompt tokens of a step that also has `decode_tokens` tokens."""
        if not decode_tokens:
            return self._max
        most = self._max - decode_tokens
        base_ms, token_ms = self.decode_costs.ms(decode_tokens), self._prompt_cost.token_ms
        if not token_ms:
            return max(1, most)
        target_ms = max(self._target_ms, MIN_ALLOWED_SLOWDOWN * base_ms)
        return max(1, min(most, max(MIN_PROMPT_TOKENS, int((target_ms - base_ms) / token_ms))))

    def background_tokens(self, decode_tokens: int) -> int:
        """Return the most prompt tokens of a step without foreground sequences."""
        token_ms = self._prompt_cost.token_ms
        if not token_ms:
            return min(self._max - decode_tokens, MIN_PROMPT_TOKENS)
        base_ms = self.decode_costs.ms(decode_tokens) if decode_tokens else 0.0
        most = int((MAX_STEP_MS - base_ms) / token_ms)
        return min(self._max - decode_tokens, max(MIN_PROMPT_TOKENS, most))

    def tokens_beside(self, decode_tokens: int) -> int:
        """Return the most prompt tokens in the background of a foreground decode step."""
        token_ms = self._prompt_cost.token_ms
        if not token_ms:
            return 0
        slack_ms = MAX_SLOWDOWN * self.decode_costs.ms(decode_tokens)
        return min(self._max - decode_tokens, int(slack_ms / token_ms))

    def observe(self, step_ms: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Record a finished step. decode_tokens: of decoding sequences, with their drafts."""
        if not prompt_tokens:
            self.decode_costs.observe(decode_tokens, step_ms)
        elif not decode_tokens or self.decode_costs.largest:
            base_ms = self.decode_costs.ms(decode_tokens) if decode_tokens else 0.0
            # a remainder that is small against the base is mostly noise: assume at least a tenth
            self._prompt_cost.add(max(step_ms - base_ms, step_ms / 10), prompt_tokens)


class _PromptTokenCost:
    """Average ms per prompt token, weighted by tokens because short steps are mostly overhead."""

    def __init__(self) -> None:
        self._ms = self._tokens = 0.0

    @property
    def token_ms(self) -> float | None:
        return self._ms / self._tokens if self._tokens else None

    def add(self, ms: float, tokens: int) -> None:
        self._ms = (1 - _EWMA_WEIGHT) * self._ms + ms
        self._tokens = (1 - _EWMA_WEIGHT) * self._tokens + tokens
