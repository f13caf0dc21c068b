"""Compares what two models, or two KV types, would have said on the same texts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localgen.audit.comparison import Tally, log_softmax
from localgen.audit.scored_text import ScoredText, Selection
from localgen.audit.teacher_forcing import STEP_TOKENS, ForcedContext, ForcedModel
from localgen.backends.errors import InvalidRequest

REFERENCE_KV = "f16"
# steps that are timed before the audit
_PROBE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Side:
    """A model with a KV type that is compared with the reference."""

    name: str
    model: ForcedModel
    kv_type: str = REFERENCE_KV


class Audit:
    """A reference and the sides that are compared with it. Close it after use.

    ctx: tokens of each KV cache. Raises LoadFailed if a KV cache cannot be allocated.
    """

    def __init__(self, reference: Side, sides: Sequence[Side], ctx: int, num_worst: int) -> None:
        with contextlib.ExitStack() as stack:
            self._reference = _open(stack, reference, ctx)
            self._sides = [_open(stack, side, ctx) for side in sides]
            self.tallies = [Tally(side.name, num_worst) for side in sides]
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def estimate_s(self, selection: Selection) -> float:
        """Seconds that the audit will take, from a timed step of each side."""
        tokens = max((text.tokens for text in selection.texts), key=len)[:_PROBE_TOKENS]
        for context in (self._reference, *self._sides):  # the first step reads the weights
            context.begin((), 1)
            context.advance(tokens[:1], 1)
        started_s = time.monotonic()
        for context in (self._reference, *self._sides):
            context.begin((), 1)
            context.advance(tokens, 1)
        return (time.monotonic() - started_s) / len(tokens) * selection.num_tokens

    def run(self, selection: Selection, on_tokens: Callable[[int], None]) -> None:
        """Read all texts. on_tokens: called with the number of scored tokens so far."""
        done = 0
        for text in selection.texts:
            for tally in self.tallies:
                tally.begin_text()
            for at, rows in self._steps(text):
                reference, *others = rows
                for tally, audited in zip(self.tallies, others, strict=True):
                    tally.add(text.name, text.tokens, at, reference, audited)
                done += len(reference)
                on_tokens(done)

    def _steps(self, text: ScoredText) -> Iterator[tuple[int, list[NDArray[np.float64]]]]:
        """The first scored token of each step, and the log probabilities of all sides."""
        contexts = (self._reference, *self._sides)
        begun = min(context.begin(text.tokens, text.start) for context in contexts)
        for context in contexts:
            context.begin(text.tokens[:begun], begun + 1)
        # the last token is scored, not read
        for start in range(begun, len(text.tokens) - 1, STEP_TOKENS):
            end = min(start + STEP_TOKENS, len(text.tokens) - 1)
            outputs = max(0, end - max(start, text.start - 1))
            rows = [
                log_softmax(context.advance(text.tokens[start:end], outputs))
                for context in contexts
            ]
            if outputs:
                yield end - outputs + 1, rows


def require_same_vocabulary(one: Side, other: Side) -> None:
    """Raise InvalidRequest if the tokens of two models differ."""
    ours, theirs = one.model.tokenizer, other.model.tokenizer
    same = ours.vocab_size == theirs.vocab_size and all(
        ours.id_to_token(token) == theirs.id_to_token(token) for token in range(ours.vocab_size)
    )
    if not same:
        raise InvalidRequest(
            f"{one.name} and {other.name} have different tokens "
            f"({ours.vocab_size:,} and {theirs.vocab_size:,}): the reference must be the same "
            "model in more bits",
            param="reference",
        )


def _open(stack: contextlib.ExitStack, side: Side, ctx: int) -> ForcedContext:
    context = ForcedContext(side.model, ctx=ctx, kv_type=side.kv_type)
    return stack.enter_context(contextlib.closing(context))
