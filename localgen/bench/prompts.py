"""Prompts of a number of tokens that no prefix cache has seen."""

from __future__ import annotations

import inspect
import itertools
import random
import textwrap

# most tokenizers have each of these as one token, with the space before it
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from"
    " or had an they which one you were all her she there would their we him been has when who will"
    " no more if out so up said what its about than into them can only other time new some could"
    " these two may first then do any like my now over such our man me even most made after also"
    " did many off before must well back through years much where your way down should because long"
    " each just state those people too mr how little good world make very year still see own work"
    " men day get here between both life being under three never know same last another while us"
    " might great old go come since against right came take used himself few house use place"
)
_EDIT = "Here is a file again, with the parameter `width` renamed to `columns`.\n\n"


class WordPrompts:
    """Random words, counted in tokens of the model. seed: of the words.

    The rate of tokens per word is learned with count(), from what the server counts.
    """

    def __init__(self, seed: int) -> None:
        self._random, self._choices = random.Random(seed), _WORDS.split()
        self._words, self._tokens = 0, 0

    def make(self, tokens: int) -> str:
        """A prompt of about this many tokens."""
        return self.like(tokens, self._random)

    def like(self, tokens: int, chance: random.Random) -> str:
        """A prompt of about this many tokens, of words that `chance` draws."""
        rate = self._tokens / self._words if self._words else 1.0
        # each word once before one comes again: their numbers of tokens differ
        decks = (chance.sample(self._choices, len(self._choices)) for _ in itertools.count())
        words = itertools.chain.from_iterable(decks)
        return " ".join(itertools.islice(words, max(1, round(tokens / rate))))

    def count(self, prompt: str, tokens: int) -> None:
        """Learn that a prompt has this many tokens."""
        if tokens:
            self._words, self._tokens = len(prompt.split()), tokens


def code_edit() -> str:
    """A file of Python's library, to be written again: of such answers drafts guess the most."""
    return f"{_EDIT}```python\n{inspect.getsource(textwrap.dedent)}```\n\n```python\n"
