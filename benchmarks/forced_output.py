"""A runner with forced output, and prompts with answers for it: copies, and prose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from localgen.backends.runner.interface import (
    Chunk,
    ModelRunner,
    PoolUsage,
    SampledTokens,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence

HELD_OUT = Path(__file__).parent / "data/choosing.txt"
# tokens that replace an edited one
_INSERTED = 3
# a prompt and its answer
Text = tuple[list[int], list[int]]


class ForcedOutputRunner:
    """Computes every step of a model, and replaces the output after known prompts.

    Closing it does not close the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self.limits = runner.limits

    def force(self, prompt: Seq[int], answer: Seq[int]) -> None:
        """Set the answer to a prompt."""
        self._texts[tuple(prompt)] = [*prompt, *answer]

    def admit(self, seq: Sequence, *, spare: int) -> int:
        return self._runner.admit(seq, spare=spare)

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self._runner.num_cached(tokens, cache_salt)

    def grow(self, seq: Sequence, n: int) -> bool:
        return self._runner.grow(seq, n)

    def launch(self, chunks: Seq[Chunk]) -> Any:
        return chunks, self._runner.launch(chunks)

    def collect(self, ticket: Any) -> StepResult:
        chunks, own = ticket
        found = self._runner.collect(own)
        return [self._forced(chunk) or one for chunk, one in zip(chunks, found, strict=True)]

    def _forced(self, chunk: Chunk) -> SampledTokens | None:
        text = self._texts.get(tuple(chunk.seq.tokens[: chunk.seq.num_prompt]))
        if text is None or not chunk.is_sampled:
            return None
        at = chunk.start + len(chunk) - chunk.num_drafts
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        pairs = zip(drafts, text[at:], strict=False)
        accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return SampledTokens(tuple(text[at : at + accepted + 1]))

    def rewind(self, seq: Sequence, length: int) -> None:
        self._runner.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self._runner.release(seq, keep=keep)

    def usage(self) -> PoolUsage:
        return self._runner.usage()

    def close(self) -> None:
        """The model belongs to the caller."""


def copies(tokens: int, vocab: int, *, edited: float, seed: int) -> Text:
    """A prompt without repetitions, and an answer that copies it.

    edited: probability that a token is replaced by _INSERTED others.
    """
    chance = random.Random(seed)
    prompt = chance.sample(range(vocab // 2), tokens)
    answer: list[int] = []
    for token in prompt:
        if chance.random() < edited:
            answer += chance.sample(range(vocab // 2, vocab), _INSERTED)
        else:
            answer.append(token)
    return prompt, answer[:tokens]


def prose(prompt: int, answer: int, count: int, *, vocab: int) -> list[Text]:
    """Passages of a real text, with a token per word. prompt, answer: tokens of each."""
    numbers: dict[str, int] = {}
    words = HELD_OUT.read_text(encoding="utf-8").split()
    ids = [numbers.setdefault(word, len(numbers)) % vocab for word in words]
    stride = (len(ids) - prompt - answer) // max(1, count)
    starts = [number * stride for number in range(count)]
    return [(ids[at : at + prompt], ids[at + prompt : at + prompt + answer]) for at in starts]
