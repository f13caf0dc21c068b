"""How a piece of a call is written: one notation, from which parser and grammar are made."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence


class Part(enum.Enum):
    """What is not literal text. SPACE: white space, or none. NAME: the function's."""

    SPACE = enum.auto()
    NAME = enum.auto()


SPACE, NAME = Part.SPACE, Part.NAME
Spec = tuple[str | Part, ...]

# what a function may be called; everything that is safe within any of the notations
NAME_PATTERN = r"[A-Za-z0-9_.\-]{1,64}"
_ATOMS = {SPACE: r"\s*", NAME: r"([A-Za-z0-9_.\-]*)"}


class Pattern:
    """A spec as text comes in: whether it is there, and whether it may still come.

    ahead: a character that has to follow, and is no part of it.
    """

    def __init__(self, spec: Spec, ahead: str = "") -> None:
        atoms = list(_atoms(spec))
        atoms += [f"(?={re.escape(ahead)})"] if ahead else []
        self._whole = re.compile("".join(atoms))
        self._begun = re.compile(_each_optional(atoms) + r"\Z")

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """The whole of it at that place; group 1 is the function's name where there is one."""
        return self._whole.match(text, at)

    def may_come(self, text: str, at: int = 0) -> bool:
        """Whether the text from there on, to its end, is a beginning of it."""
        return self._begun.match(text, at) is not None


def _atoms(spec: Spec) -> Sequence[str]:
    return [
        atom
        for part in spec
        for atom in ([_ATOMS[part]] if isinstance(part, Part) else map(re.escape, part))
    ]


def _each_optional(atoms: Sequence[str]) -> str:
    """Matches every beginning of the sequence."""
    nested = ""
    for atom in reversed(atoms):
        nested = f"(?:{atom}{nested})?"
    return nested
