"""A byte-level BPE vocabulary of invented words, of any size.

Every text round-trips, because all 256 bytes are tokens. The output of a random model is tokenized
to the same tokens again, because it consists of whole words (see RandomVocabulary.spoken).
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

NUM_SPECIAL = 256
# size of the smallest vocabulary: bytes, two-letter words, control tokens
LEAST = 256 + 26**2 * 2 + 26 + NUM_SPECIAL
SPACE = "Ġ"  # a space, in GPT-2's printable bytes
_SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class RandomVocabulary:
    """Tokens by id: 256 bytes, merged pieces, then NUM_SPECIAL control tokens as in Llama 3.

    spoken: ids of the pieces that begin with a space and thus are whole words.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    spoken: tuple[int, ...]

    def special_id(self, name: str) -> int:
        """Return the id of a control token."""
        return self.tokens.index(name, len(self.tokens) - NUM_SPECIAL)


def random_vocabulary(size: int) -> RandomVocabulary:
    """Return the vocabulary of `size` tokens, the same in each call.

    Raises ValueError if the size is too small or too large.
    """
    if size < LEAST:
        raise ValueError(f"{size} tokens are too few, two-letter words alone need {LEAST:,}")
    num_merged = size - 256 - NUM_SPECIAL
    pairs = list(itertools.islice(_pairs(), num_merged))
    if len(pairs) < num_merged:
        raise ValueError(f"{size} tokens are more than the {len(pairs)} words there are")
    special = [_SPECIAL.get(i, f"<|reserved_special_token_{i}|>") for i in range(NUM_SPECIAL)]
    tokens = (*_byte_pieces(), *(left + right for left, right in pairs), *special)
    normal = size - NUM_SPECIAL
    return RandomVocabulary(
        tokens=tokens,
        merges=tuple(f"{left} {right}" for left, right in pairs),
        spoken=tuple(i for i in range(256, normal) if tokens[i][0] == SPACE),
    )


def random_words(count: int, seed: str) -> str:
    """Return a text of exactly `count` tokens, at the start of a prompt or after a space."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=2)) for _ in range(count))


def _byte_pieces() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield merges: `a b`, `Ġ a`, `Ġ ab`, `ab c`, `Ġ abc`, `Ġab cd`; most useful first."""
    letters = string.ascii_lowercase
    two = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    yield from itertools.product(letters, letters)
    yield from ((SPACE, piece) for piece in (*letters, *two))
    yield from itertools.product(two, letters)
    yield from ((SPACE, piece + letter) for piece in two for letter in letters)
    yield from ((SPACE + left, right) for left in two for right in two)
