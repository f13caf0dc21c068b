"""Where a prompt parts from an earlier one, so that the prefix cache could not serve the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_duration, format_elapsed

# fewer tokens than this are not worth a report
MIN_TOKENS_AGAIN = 256
_LONG_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBreak:
    """The place where a prompt parts from an earlier prompt with which it shares most text.

    place: the system message, the tools, message N (ROLE), or the prompt. byte: UTF-8 offset in it.
    before, after: short excerpts of the earlier and of this prompt, on one line; before is empty
    where the client may not see it. token: number of
    tokens before the place. tokens: tokens of shared text behind it that were computed again
    (estimated from samples of the text). ms: their share of the time of the prompt.
    """

    place: str
    byte: int
    before: str
    after: str
    token: int
    tokens: int
    ms: float = 0.0

    def measured(self, *, held: int, computed: int, prompt_ms: float) -> PrefixBreak | None:
        """With what the prompt took, or None if the earlier prefix was evicted, or little was lost.

        held: leading tokens of the earlier prompt in the prefix cache, when this one was admitted.
        computed: tokens of this prompt that were computed.
        """
        tokens = min(self.tokens, computed, held - self.token)
        if tokens < MIN_TOKENS_AGAIN:
            return None
        return replace(self, tokens=tokens, ms=prompt_ms * tokens / computed)

    def __str__(self) -> str:
        long = self.ms >= _LONG_MS
        time = format_elapsed(self.ms / 1e3) if long else format_duration(self.ms)
        return one_line(
            f"parts at byte {self.byte:,} of {self.place}: `{self.before}` became "
            f"`{self.after}`; {self.tokens:,} tokens read again, {time}"
        )


@dataclass(frozen=True, slots=True)
class FoundBreak:
    """A place that is not measured yet. earlier: the tokens of the earlier prompt."""

    place: PrefixBreak
    earlier: list[int]
