"""A request of a trace, with its prompt as segments that requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# a chunk of the gateway has 256 characters, and a token about four (docs/cluster.md)
CHUNK_TOKENS = 64


class Segment(NamedTuple):
    """A part of a prompt. key: names the part and all that is before it, so equal keys mean equal
    prefixes."""

    key: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """arrival_s: since the start of the trace. chunks: as the gateway hashes them. answer: the
    segment that the answer adds behind those of the prompt."""

    arrival_s: float
    chunks: tuple[bytes, ...]
    prompt: tuple[Segment, ...]
    answer: Segment
    prompt_tokens: int
