"""Change valid input a little: bytes, text, and the values of JSON."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 256, 65535, 65536, 100_000, 2**24 + 1),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 10**400),
)
CHARACTERS = "\x00\x07\x1b\r\n\t\x7f\x9b\u202e\u2028\ufeff\U0001d54f\ud800\"'\\{}[]%<>|,:=#$.*+?()é"
_DEPTHS = (3, 60, 1000, 20_000)


class Mutator:
    """Changes drawn from one source of random numbers."""

    def __init__(self, source: random.Random) -> None:
        self.random = source

    def data(self, content: bytes) -> bytes:
        """One to four changes of bytes."""
        changed = bytearray(content)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self.random.choice(
                (self._flip, self._flip, self._number, self._number, self._cut, self._remove,
                 self._repeat, self._insert)
            )(changed)  # fmt: skip
        return bytes(changed)

    def text(self, content: str, pieces: tuple[str, ...] = ()) -> str:
        """One to four changes of text. pieces: what else may be inserted."""
        for _ in range(self.random.choice((1, 1, 2, 4))):
            first, last = sorted(self.random.choices(range(len(content) + 1), k=2))
            last = min(last, first + self.random.choice((0, 1, 8, 64)))
            new = self.random.choice(
                (
                    "",
                    self.random.choice(CHARACTERS),
                    content[first:last] * self.random.choice((2, 3, 200)),
                    self.random.choice(pieces or tuple(CHARACTERS)),
                    str(self.random.choice(NUMBERS)),
                )
            )
            content = content[:first] + new + content[last:]
        return content

    def json(self, value: Any) -> Any:
        """A copy with one to three values replaced, removed, nested or repeated."""
        holder = [copy.deepcopy(value)]
        for _ in range(self.random.choice((1, 1, 2, 3))):
            places = list(_places(holder))
            parent, key = self.random.choice(places)
            action = self.random.random()
            if action < 0.15:
                del parent[key]
                holder = holder or [{}]
            elif action < 0.25 and isinstance(parent, dict):
                parent[self.value_text()] = parent[key]
            elif action < 0.35:  # a value from elsewhere
                other, name = self.random.choice(places)
                if parent is not other:
                    parent[key] = copy.deepcopy(_get(other, name))
            else:
                parent[key] = self.value(parent[key])
        return holder[0]

    def json_text(self, value: Any) -> str:
        """Changed JSON, sometimes with a key given twice, or with changed text."""
        text = nested_dumps(self.json(value))
        kind = self.random.random()
        if kind < 0.05:
            return "".join(text[:1] + '"a":0,"a":[],' + text[1:])
        return self.text(text) if kind < 0.15 else text

    def value(self, before: Any) -> Any:
        """Something else in place of a value of JSON."""
        choices: list[Callable[[], Any]] = [
            lambda: self.random.choice(NUMBERS),
            lambda: self.random.choice((None, True, False, "", [], {}, [[]], {"": ""})),
            self.value_text,
            lambda: [before] * self.random.choice((0, 2, 300)),
            lambda: {"type": before},
            lambda: Nested(self.random.choice(_DEPTHS), self.random.choice("[{")),
        ]
        if isinstance(before, str):
            choices += [lambda: self.text(before)] * 4
        if isinstance(before, int | float) and not isinstance(before, bool):
            # not times 0.1: an integer may be too large for a float
            choices += [lambda: before * self.random.choice((2, -1, 1000)), lambda: before // 10]
            choices += [lambda: self.random.choice(NUMBERS)] * 4
        return self.random.choice(choices)()

    def value_text(self) -> str:
        size = self.random.choice((1, 3, 20, 1000))
        return "".join(self.random.choices(CHARACTERS + "abcN", k=size))

    def _flip(self, content: bytearray) -> None:
        if content:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)

    def _number(self, content: bytearray) -> None:
        size, letter = self.random.choice(((1, "B"), (4, "I"), (8, "Q")))
        if len(content) < size:
            return
        number = int(self.random.choice(NUMBERS[:-4])) % 2 ** (8 * size)
        at = self.random.randrange(len(content) - size + 1)
        content[at : at + size] = struct.pack(f"<{letter}", number)

    def _cut(self, content: bytearray) -> None:
        del content[self.random.randrange(len(content) + 1) :]

    def _remove(self, content: bytearray) -> None:
        at = self.random.randrange(len(content) + 1)
        del content[at : at + self.random.choice((1, 4, 100))]

    def _repeat(self, content: bytearray) -> None:
        at = self.random.randrange(len(content) + 1)
        content[at:at] = content[at : at + self.random.choice((1, 8, 100))]

    def _insert(self, content: bytearray) -> None:
        at = self.random.randrange(len(content) + 1)
        content[at:at] = self.random.choice(CHARACTERS).encode(errors="surrogatepass")


class Nested:
    """Deeply nested lists or objects, which json.dumps could not write."""

    def __init__(self, depth: int, opening: str) -> None:
        start, end = ("[", "]") if opening == "[" else ('{"a":', "}")
        self.text = start * depth + "0" + end * depth

    def __deepcopy__(self, memo: Any) -> Nested:
        return self


def nested_dumps(value: Any) -> str:
    """JSON of a value with `Nested` in it."""
    found: list[Nested] = []

    def name(item: Any) -> str:
        if not isinstance(item, Nested):
            raise TypeError(type(item))
        found.append(item)
        return f"\x00nested{len(found) - 1}\x00"

    text = json.dumps(value, default=name)
    for index, item in enumerate(found):
        text = text.replace(f'"\\u0000nested{index}\\u0000"', item.text)
    return text


def _places(value: Any) -> Any:
    """Every (container, key) below a value."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = range(len(container)) if isinstance(container, list) else list(container)
        for key in keys:
            yield container, key
            if isinstance(container[key], list | dict):
                waiting.append(container[key])


def _get(container: Any, key: Any) -> Any:
    """A value that an earlier change may have removed."""
    try:
        return container[key]
    except (KeyError, IndexError):
        return None
