"""Plain-text answers, for pipes and for `run`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from localgen.backends.errors import EngineDied
from localgen.client import Completion, TextDelta


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    """A finished answer: text, reasoning, and the server's completion record."""

    text: str
    reasoning: str
    completion: Completion


def write_plain_answer(
    stream: Generator[TextDelta | Completion, None, None],
    write: Callable[[str], object],
    write_reasoning: Callable[[str], object],
) -> CollectedAnswer:
    """Write text and reasoning as they arrive and return the whole answer.

    An exception, such as Ctrl+C or a closed pipe, cancels the request. Raises EngineDied if the
    stream ends without a completion.
    """
    pieces, thoughts = [], []
    with closing(stream):
        for event in stream:
            match event:
                case TextDelta(text=text, reasoning=reasoning):
                    if reasoning:
                        thoughts.append(reasoning)
                        write_reasoning(reasoning)
                    if text:
                        pieces.append(text)
                        write(text)
                case Completion():
                    return CollectedAnswer("".join(pieces), "".join(thoughts), event)
    raise EngineDied("the answer was interrupted: send the prompt again")
