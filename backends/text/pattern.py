"""How a piece of a call is written: one notation, from which parser and grammar are made."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence


class Placeholder(enum.Enum):
    """What is not literal text. SPACE: white space, or none. NAME: the function's."""

    SPACE = enum.auto()
    NAME = enum.auto()


SPACE, NAME = Placeholder.SPACE, Placeholder.NAME
SyntaxSpec = tuple[str | Placeholder, ...]

# what a function may be called; everything that is safe within any of the notations
TOOL_NAME_PATTERN = r"[A-Za-z0-9_.\-]{1,64}"
_PLACEHOLDER_REGEX = {SPACE: r"\s*", NAME: r"([A-Za-z0-9_.\-]*)"}


class PartialPattern:
    """A spec as text comes in: whether it is there, and whether it may still come.

    lookahead: a character that has to follow, and is no part of it.
    """

    def __init__(self, spec: SyntaxSpec, lookahead: str = "") -> None:
        atoms = list(_atoms(spec))
        atoms += [f"(?={re.escape(lookahead)})"] if lookahead else []
        self._full = re.compile("".join(atoms))
        self._partial = re.compile(_any_prefix(atoms) + r"\Z")

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The whole of it at that place; group 1 is the function's name where there is one."""
        return self._full.match(text, start)

    def may_match(self, text: str, start: int = 0) -> bool:
        """Whether the text from there on, to its end, is a beginning of it."""
        return self._partial.match(text, start) is not None


def _atoms(spec: SyntaxSpec) -> Sequence[str]:
    return [
        atom
        for part in spec
        for atom in (
            [_PLACEHOLDER_REGEX[part]] if isinstance(part, Placeholder) else map(re.escape, part)
        )
    ]


def _any_prefix(atoms: Sequence[str]) -> str:
    """Matches every beginning of the sequence."""
    nested = ""
    for atom in reversed(atoms):
        nested = f"(?:{atom}{nested})?"
    return nested
