"""What a chat leaves out if it does not fit the context, where the request allows that.

The oldest turns go; system messages at the start, tools and the last turn stay. A turn is a user's
message with all that follows up to the next one, so that tool calls keep their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from localgen.backends.types import Message

# of the context: what an answer needs at most, and the unit in which turns are left out
_SHARE = 4
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Shortened:
    """Messages that fit, and how many were left out."""

    messages: tuple[Message, ...]
    num_left_out: int


def answer_room(ctx: int, max_tokens: int | None) -> int:
    """Tokens of the context that the answer gets: a quarter, or max_tokens if that is less."""
    share = max(1, ctx // _SHARE)
    return share if max_tokens is None else max(1, min(max_tokens, share))


def drop_oldest(
    messages: tuple[Message, ...], ctx: int, fits: Callable[[tuple[Message, ...]], bool]
) -> Shortened:
    """Leave out the oldest turns until the rest fits, or only the last turn is left.

    More is left out than must be, in units of a quarter of the context: so the next turns of the
    conversation begin with the same messages, which are in the prefix cache. fits: whether
    messages fit; it is called a few times.
    """
    head, starts = _turns(messages)
    low, high = 0, len(starts) - 1  # turns to leave out; the last one stays
    while low < high:
        middle = (low + high) // 2
        if fits((*head, *messages[starts[middle] :])):
            high = middle
        else:
            low = middle + 1
    count = _rounded_up(messages, starts, low, max(1, ctx // _SHARE) * _CHARS_PER_TOKEN)
    if not count:
        return Shortened(messages, 0)
    kept = (*head, *messages[starts[count] :])
    return Shortened(kept, len(messages) - len(kept))


def _turns(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[int]]:
    """The system messages at the start, and where each turn begins."""
    first = next((at for at, each in enumerate(messages) if each.role != "system"), len(messages))
    later = [at for at in range(first + 1, len(messages)) if messages[at].role == "user"]
    return messages[:first], [first, *later]


def _rounded_up(
    messages: tuple[Message, ...], starts: list[int], count: int, unit_chars: int
) -> int:
    """The least number of turns from `count` on whose characters fill whole units."""
    if not count:
        return 0
    chars = [_num_chars(messages[start:end]) for start, end in pairwise(starts)]
    wanted = -(-sum(chars[:count]) // unit_chars) * unit_chars
    while count < len(chars) and sum(chars[:count]) < wanted:
        count += 1
    return count


def _num_chars(messages: tuple[Message, ...]) -> int:
    return sum(
        len(each.content)
        + len(each.reasoning or "")
        + sum(len(call.arguments) for call in each.tool_calls)
        for each in messages
    )
