"""An answer as plain text, for pipes and for `run`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from localgen.backends.errors import EngineDied
from localgen.client import Answer, Text


def stream_plain(
    stream: Generator[Text | Answer, None, None], write: Callable[[str], object]
) -> tuple[str, Answer]:
    """Write an answer piece by piece; gives the whole text and how it ended.

    Leaving early, by Ctrl+C or a closed pipe, cancels the request.
    """
    pieces = []
    with closing(stream):
        for event in stream:
            match event:
                case Text(text=text):
                    pieces.append(text)
                    write(text)
                case Answer():
                    return "".join(pieces), event
    raise EngineDied("the answer broke off: ask again")
