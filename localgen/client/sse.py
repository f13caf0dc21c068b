"""Server-sent events, as far as OpenAI's protocol uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

DONE = b"[DONE]"


def iter_sse_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event; comments and other fields are left out.

    Only LF or CRLF end a line: text may hold other line breaks. An event that is not closed by
    a blank line was cut off and is no event, but the last one of all needs none.
    """
    parts: list[bytes] = []
    for line in _iter_lines(chunks):
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
        if parts and (not line or parts == [DONE]):
            yield b"\n".join(parts)
            parts = []


def _iter_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest
