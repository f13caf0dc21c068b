"""An answer as plain text, for pipes and for `run`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from localgen.backends.errors import EngineDied
from localgen.client import Answer, Text


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that has ended: its text, what the model thought before, and how it was served."""

    text: str
    reasoning: str
    answer: Answer


def stream_plain(
    stream: Generator[Text | Answer, None, None],
    write: Callable[[str], object],
    write_thought: Callable[[str], object],
) -> Whole:
    """Write an answer piece by piece, and what is thought before; gives the whole of it.

    Leaving early, by Ctrl+C or a closed pipe, cancels the request.
    """
    pieces, thoughts = [], []
    with closing(stream):
        for event in stream:
            match event:
                case Text(text=text, reasoning=reasoning):
                    if reasoning:
                        thoughts.append(reasoning)
                        write_thought(reasoning)
                    if text:
                        pieces.append(text)
                        write(text)
                case Answer():
                    return Whole("".join(pieces), "".join(thoughts), event)
    raise EngineDied("the answer broke off: ask again")
