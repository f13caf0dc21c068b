"""What a chat leaves out if it does not fit the context, where the request allows that.

The oldest turns go; system messages at the start, tools and the last turn stay. A turn is a user's
message with all that follows up to the next one, so that tool calls keep their results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from localgen.backends.types import Message

# of the context: what an answer needs at most, and the unit in which turns are left out
_SHARE = 4


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
    messages: tuple[Message, ...],
    ctx: int,
    count_tokens: Callable[[tuple[Message, ...]], int | None],
) -> Shortened:
    """Leave out the oldest turns until the rest fits, or only the last turn is left.

    More is left out than must be, in units of about a quarter of the context: so the next turns of
    the conversation begin with the same messages, which are in the prefix cache. count_tokens: of
    the prompt with these messages, None if it does not fit; it is called a few times.
    """
    head, starts = _turns(messages)
    low, high = 0, len(starts) - 1  # turns to leave out; the last one stays
    num_tokens: int | None = None
    while low < high:
        middle = (low + high) // 2
        counted = count_tokens((*head, *messages[starts[middle] :]))
        if counted is None:
            low = middle + 1
        else:
            high, num_tokens = middle, counted
    count = low
    if count and num_tokens is not None:
        # the head and the last turn may have other texts, and tools
        others = count_tokens((*head, *messages[starts[-1] :])) or 0
        num_chars = _num_chars(messages[starts[count] : starts[-1]])
        chars_per_token = max(1, num_chars) / max(1, num_tokens - others)
        count = _rounded_up(messages, starts, count, _unit_chars(ctx, chars_per_token))
    if not count:
        return Shortened(messages, 0)
    kept = (*head, *messages[starts[count] :])
    return Shortened(kept, len(messages) - len(kept))


def _unit_chars(ctx: int, chars_per_token: float) -> float:
    """Characters of about a quarter of the context, the same ones while the conversation grows."""
    return max(1, ctx // _SHARE) * 2.0 ** round(math.log2(chars_per_token))


def _turns(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], list[int]]:
    """The system messages at the start, and where each turn begins."""
    first = next((at for at, each in enumerate(messages) if each.role != "system"), len(messages))
    later = [at for at in range(first + 1, len(messages)) if messages[at].role == "user"]
    return messages[:first], [first, *later]


def _rounded_up(
    messages: tuple[Message, ...], starts: list[int], count: int, unit_chars: float
) -> int:
    """The least number of turns from `count` on whose characters fill whole units."""
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
