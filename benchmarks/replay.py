"""Texts that are said whatever a model would say, and what drafts from them could gain at most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import localgen.quant
from benchmarks.step_curve import Curve, step_ms
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.runner.interface import (
    Chunk,
    ModelRunner,
    PoolUsage,
    SampledTokens,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams

HELD_OUT = Path(localgen.quant.__file__).parent / "texts/heldout.txt"
# tokens in place of a copied one where a copy differs
_CHANGED = 3


class Reciting:
    """A model that computes as it would, and says how the text goes on whose beginning it was
    given. Closing it leaves the model as it is."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self.limits = runner.limits

    def learn(self, prompt: Seq[int], answer: Seq[int]) -> None:
        """What to say after a prompt."""
        self._texts[tuple(prompt)] = [*prompt, *answer]

    def admit(self, seq: Sequence, *, spare: int) -> int:
        return self._runner.admit(seq, spare=spare)

    def grow(self, seq: Sequence, n: int) -> bool:
        return self._runner.grow(seq, n)

    def launch(self, chunks: Seq[Chunk]) -> Any:
        return chunks, self._runner.launch(chunks)

    def collect(self, ticket: Any) -> StepResult:
        chunks, own = ticket
        found = self._runner.collect(own)
        return [self._said(chunk) or one for chunk, one in zip(chunks, found, strict=True)]

    def _said(self, chunk: Chunk) -> SampledTokens | None:
        text = self._texts.get(tuple(chunk.seq.tokens[: chunk.seq.num_prompt]))
        if text is None or not chunk.is_sampled:
            return None
        at = chunk.start + len(chunk) - chunk.num_drafts
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        right = _right(drafts, text[at:])
        return SampledTokens(tuple(text[at : at + right + 1]))

    def rewind(self, seq: Sequence, length: int) -> None:
        self._runner.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self._runner.release(seq, keep=keep)

    def usage(self) -> PoolUsage:
        return self._runner.usage()

    def close(self) -> None:
        """The model is not ours."""


def _right(drafts: Seq[int], text: Seq[int]) -> int:
    """Drafts before the first wrong one."""
    pairs = zip(drafts, text, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def copies(tokens: int, vocab: int, *, edited: float, seed: int) -> tuple[list[int], list[int]]:
    """A prompt without repetitions, and an answer that says it again, with a few other tokens in
    place of each one that is chosen with probability `edited`."""
    chance = random.Random(seed)
    prompt = chance.sample(range(vocab // 2), tokens)
    answer: list[int] = []
    for token in prompt:
        if chance.random() < edited:
            answer += chance.sample(range(vocab // 2, vocab), _CHANGED)
        else:
            answer.append(token)
    return prompt, answer[:tokens]


def natural(
    prompt: int, answer: int, count: int, *, vocab: int
) -> list[tuple[list[int], list[int]]]:
    """So many pieces of a real text, its words as tokens, each with how it goes on."""
    numbers: dict[str, int] = {}
    words = HELD_OUT.read_text(encoding="utf-8").split()
    ids = [numbers.setdefault(word, len(numbers)) % vocab for word in words]
    each = (len(ids) - prompt - answer) // max(1, count)
    starts = [number * each for number in range(count)]
    return [(ids[at : at + prompt], ids[at + prompt : at + prompt + answer]) for at in starts]


def best(curve: Curve, texts: Seq[tuple[Seq[int], Seq[int]]]) -> tuple[int, float]:
    """The number of drafts that n-gram lookup gains most with if it is the same in each step of all
    texts, of those whose step was measured, and what it gains. texts: prompts with their answers,
    the first token of which comes with the prompt."""
    plain_ms = sum(step_ms(curve, 1) * (len(answer) - 1) for _, answer in texts)
    times = {
        size - 1: sum(_took_ms(curve, prompt, answer, size - 1) for prompt, answer in texts)
        for size in curve
    }
    drafts = min(times, key=times.__getitem__)
    return drafts, plain_ms / times[drafts]


def _took_ms(curve: Curve, prompt: Seq[int], answer: Seq[int], drafts: int) -> float:
    text = [*prompt, *answer]
    seq = Sequence(
        id="replay",
        tokens=text[: len(prompt) + 1],
        num_prompt=len(prompt),
        params=SamplingParams(),
        ctx=len(text),
        max_len=len(text),
    )
    drafter, took_ms = NgramDrafter(), 0.0
    while len(seq.tokens) < len(text):
        left = len(text) - len(seq.tokens) - 1
        (proposal,) = drafter.propose([(seq, min(drafts, left))])
        found, at = proposal.tokens, len(seq.tokens)
        seq.tokens += text[at : at + _right(found, text[at:]) + 1]
        took_ms += step_ms(curve, 1 + len(found))
    return took_ms
