"""How many prompt tokens a step may carry while others are decoding."""

from __future__ import annotations

MIN_TOKENS = 16
GROWTH = 1.25


class TokenBudget:
    """Shrinks when a mixed step passes the inter-token target, grows back when it stays under."""

    def __init__(self, max_tokens: int, itl_target_ms: float) -> None:
        self._max = max_tokens
        self._target_ms = itl_target_ms
        self._tokens = float(max_tokens)

    def tokens(self, decoding: int) -> int:
        """Prompt tokens for a step with that many decoding sequences beside them."""
        if not decoding:
            return self._max
        return max(1, min(int(self._tokens), self._max - decoding))

    def observe(self, step_ms: float, prompt_tokens: int, decoding: int) -> None:
        """Learn from a finished step."""
        if not decoding or not prompt_tokens:
            return
        if step_ms > self._target_ms:
            shrunk = prompt_tokens * self._target_ms / step_ms
            self._tokens = max(MIN_TOKENS, min(self._tokens, shrunk))
        else:
            self._tokens = min(self._max, self._tokens * GROWTH)
