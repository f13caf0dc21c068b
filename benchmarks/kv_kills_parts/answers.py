"""Prompts whose answers depend on all of their text, and answers that are compared."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from benchmarks.random_vocabulary import random_words
from benchmarks.streams import StreamFailed
from localgen.client import LocalClient
from localgen.hub.packaged import BUILT_IN_PATH

_NUM_TOP = 20
_OWN_WORDS, _QUOTED_WORDS = 40, 8


@dataclass(frozen=True, slots=True)
class Size:
    """How many prompts there are, and how many of them each round sends.

    heads: common beginnings. tails: prompts per head. asked: prompts before the kill. checked:
    prompts after it. head_words: words of a head, of 1.9 tokens on average. Prefixes of 512 tokens
    are stored at once, shorter ones when they are used again.
    """

    heads: int
    tails: int
    asked: int
    checked: int
    answer_tokens: int
    head_words: int


SIZES = {"llamacpp": Size(6, 4, 6, 4, 8, 250), "cuda": Size(3, 2, 2, 2, 3, 320)}


@dataclass(frozen=True, slots=True)
class Answer:
    """tops: log-probabilities of the likeliest tokens, by token.

    restored: tokens from disk, or from RAM, into which the disk is read ahead.
    """

    tops: tuple[dict[str, float], ...]
    restored: int = 0


def prompts_of(size: Size) -> list[str]:
    """Texts of words of their own, which quote themselves: the answer depends on all of a text."""
    found = []
    for head, tail in itertools.product(range(size.heads), range(size.tails)):
        source, own = random.Random(head), random_words(_OWN_WORDS, f"{head}").split()
        words = [source.choice(own) for _ in range(size.head_words)]
        at = tail * size.head_words // size.tails + _QUOTED_WORDS
        found.append(f"{' '.join(words)}. {' '.join(words[at : at + _QUOTED_WORDS])}")
    return found


def distance(one: Answer, other: Answer) -> float:
    """Root mean square difference of log-probabilities, up to where the texts part."""
    squares: list[float] = []
    for ours, theirs in zip(one.tops, other.tops, strict=True):
        common = ours.keys() & theirs.keys()
        if not common:
            return math.inf
        squares += [(ours[token] - theirs[token]) ** 2 for token in common]
        if max(ours, key=ours.__getitem__) != max(theirs, key=theirs.__getitem__):
            break
    return math.sqrt(sum(squares) / len(squares))


def ask(client: LocalClient, prompt: str, tokens: int) -> Answer:
    """A greedy answer of the built-in model. Raises StreamFailed, LocalgenError."""
    body = {
        "model": str(BUILT_IN_PATH),
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": _NUM_TOP,
    }
    reply = client.send("completions", body)
    if reply.status != 200:
        raise StreamFailed(f"{reply.status}: {reply.body}")
    restored = [part for part in reply.body["timings"]["restored"] if part["tier"] != "peer"]
    (choice,) = reply.body["choices"]
    tops = tuple(choice["logprobs"]["top_logprobs"])
    return Answer(tops, sum(part["tokens"] for part in restored))
