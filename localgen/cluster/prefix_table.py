"""Which replica has which beginning of a prompt: chained hashes of chunks of its text."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# characters of a chunk; a token has about four, and a block of KV 16 tokens or more
CHUNK_CHARS = 256
# entries of the table: 65,536 chunks are 4 million tokens
MAX_CHUNKS = 65_536
# the fields of a request that its prompt begins with, in the order in which templates use them
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")


def prompt_chunks(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Chained hashes of the prompt's whole chunks of CHUNK_CHARS, 8 bytes each, under its model.

    body: a request of any of the APIs. Messages are hashed as JSON, so that roles and tool calls
    count, and the next request of a conversation begins with the chunks of the last one.
    """
    text = "".join(_prompt_parts(body))
    digest = hashlib.blake2b(str(body.get("model") or "").encode(), digest_size=8)
    found = []
    for start in range(0, len(text) - CHUNK_CHARS + 1, CHUNK_CHARS):
        digest.update(text[start : start + CHUNK_CHARS].encode(errors="replace"))
        found.append(digest.copy().digest())
    return tuple(found)


def _prompt_parts(body: Mapping[str, Any]) -> Iterable[str]:
    for name in _PROMPT_FIELDS:
        value = body.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (json.dumps(part, sort_keys=True, ensure_ascii=False) for part in value)


class PrefixTable:
    """Remembers the replicas that computed a chunk, the latest MAX_CHUNKS of them."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._owners: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        self._max_chunks = max_chunks

    def add(self, chunks: Iterable[bytes], replica: str) -> None:
        """Note that a replica computes these chunks."""
        for chunk in chunks:
            self._owners.setdefault(chunk, {})[replica] = None
            self._owners.move_to_end(chunk)
        while len(self._owners) > self._max_chunks:
            self._owners.popitem(last=False)

    def drop(self, replica: str) -> None:
        """Forget a replica that has ended."""
        for chunk in [chunk for chunk, owners in self._owners.items() if replica in owners]:
            del self._owners[chunk][replica]
            if not self._owners[chunk]:
                del self._owners[chunk]

    def cached_chunks(self, chunks: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """The number of first chunks that each replica has."""
        found = dict.fromkeys(replicas, 0)
        having = set(found)
        for count, chunk in enumerate(chunks, 1):
            having &= self._owners.get(chunk, {}).keys()
            if not having:
                break
            found.update(dict.fromkeys(having, count))
        return found

    def rank(self, chunks: Sequence[bytes], loads: Mapping[str, int], spill: int) -> list[str]:
        """The replicas, best first.

        loads: requests of each replica, running and waiting. The one with most chunks is first,
        unless it has over `spill` requests more than the least loaded one; then, and without any
        chunk, the least loaded is. Equal ones are ordered by rendezvous hashing of the first chunk,
        so that gateways that know different things choose the same.
        """
        cached = self.cached_chunks(chunks, loads)
        first = chunks[0] if chunks else b""

        def by_load(replica: str) -> tuple[int, int, bytes]:
            vote = hashlib.blake2b(replica.encode(), key=first, digest_size=8).digest()
            return loads[replica], -cached[replica], vote

        ranked = sorted(loads, key=by_load)
        best = max(ranked, key=lambda replica: cached[replica], default=None)
        if best is not None and cached[best] and loads[best] - loads[ranked[0]] <= spill:
            ranked.remove(best)
            ranked.insert(0, best)
        return ranked
