"""Limit the prefill tokens of a step while other sequences are decoding."""

from __future__ import annotations

MIN_PROMPT_TOKENS = 16
# a mixed step may take this many times its decode-only duration, even beyond the target:
# otherwise prefill would starve where decoding alone already exceeds the target
MIN_ALLOWED_SLOWDOWN = 3.0
_EWMA_WEIGHT = 0.3


class TokenBudget:
    """Keeps mixed steps near the inter-token latency target, using measured step times.

    Cost model: base_ms(d) for d decoding sequences, plus token_ms for each prompt token.
    """

    def __init__(self, max_tokens: int, itl_target_ms: float) -> None:
        self._max = max_tokens
        self._target_ms = itl_target_ms
        self._decode_ms_by_size: dict[int, _MovingAverage] = {}
        self._prompt_cost = _PromptTokenCost()

    def prompt_tokens(self, num_decoding: int) -> int:
        """Return the maximum number of prompt tokens in a step with num_decoding sequences."""
        if not num_decoding:
            return self._max
        most = self._max - num_decoding
        base_ms, token_ms = self._decode_ms(num_decoding) or 0.0, self._prompt_cost.token_ms
        if not token_ms:
            return max(1, most)
        target_ms = max(self._target_ms, MIN_ALLOWED_SLOWDOWN * base_ms)
        return max(1, min(most, max(MIN_PROMPT_TOKENS, int((target_ms - base_ms) / token_ms))))

    def observe(self, step_ms: float, prompt_tokens: int, num_decoding: int) -> None:
        """Update the cost model with a finished step."""
        if not prompt_tokens:
            self._decode_ms_by_size.setdefault(num_decoding, _MovingAverage()).add(step_ms)
            return
        base_ms = self._decode_ms(num_decoding) if num_decoding else 0.0
        if base_ms is not None:
            # a remainder that is small against the base is mostly noise: assume at least a tenth
            self._prompt_cost.add(max(step_ms - base_ms, step_ms / 10), prompt_tokens)

    def _decode_ms(self, num_decoding: int) -> float | None:
        """Decode-only step time at the nearest measured number of sequences; None if unknown."""
        if not self._decode_ms_by_size:
            return None
        nearest = min(self._decode_ms_by_size, key=lambda seen: abs(seen - num_decoding))
        return self._decode_ms_by_size[nearest].value


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


class _MovingAverage:
    """Exponentially weighted moving average."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        old = sample if self.value is None else self.value
        self.value = old + _EWMA_WEIGHT * (sample - old)
