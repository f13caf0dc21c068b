"""Server-sent events, as far as OpenAI's protocol uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

DONE = b"[DONE]"
_PREFIX = b"data: "


def payloads(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event. Only a blank line ends one: text may hold other line breaks."""
    rest = b""
    for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(_PREFIX):
                yield event.removeprefix(_PREFIX)
