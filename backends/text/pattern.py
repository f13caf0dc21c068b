"""Syntax specs of tool calls: one notation from which both parser and grammar are built."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence


class Placeholder(enum.Enum):
    """The non-literal parts of a spec. SPACE: optional whitespace. NAME: the function name."""

    SPACE = enum.auto()
    NAME = enum.auto()


SPACE, NAME = Placeholder.SPACE, Placeholder.NAME
SyntaxSpec = tuple[str | Placeholder, ...]

# function names; all of these characters are safe in every notation
_PLACEHOLDER_REGEX = {SPACE: r"\s*", NAME: r"([A-Za-z0-9_.\-]*)"}


class PartialPattern:
    """Matches a spec against incoming text, completely or as a prefix.

    lookahead: a character that must follow but is not part of the match.
    """

    def __init__(self, spec: SyntaxSpec, lookahead: str = "") -> None:
        atoms = list(_atoms(spec))
        atoms += [f"(?={re.escape(lookahead)})"] if lookahead else []
        self._full = re.compile("".join(atoms))
        self._partial = re.compile(_any_prefix(atoms) + r"\Z")

    def match(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Match the whole spec at `start`. Group 1 is the function name, if the spec has one."""
        return self._full.match(text, start)

    def may_match(self, text: str, start: int = 0) -> bool:
        """Return True if the text from `start` to its end is a prefix of the spec."""
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
    """Return a regex that matches every prefix of the sequence."""
    nested = ""
    for atom in reversed(atoms):
        nested = f"(?:{atom}{nested})?"
    return nested
