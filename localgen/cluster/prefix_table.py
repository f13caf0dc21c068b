"""Which replica has which beginning of a prompt: chained hashes of chunks of its text."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from localgen.backends.types import CHUNK_HASH_BYTES, MAX_REPORTED_CHUNKS

# characters of a chunk; a token has about four, and a block of KV 16 tokens or more
CHUNK_CHARS = 256
# a replica that was sent a prompt has reported it after this time, or does not have it
ROUTED_S = 10.0
# entries of the table with up to 8 replicas: 65,536 chunks are 4 million tokens
_MIN_CHUNKS = 65_536
# first chunks whose order of replicas is kept, and replicas in it, some of which have left: 16 MB
_MAX_ORDERS, _MAX_VOTERS = 1024, 2048
# the fields of a request that its prompt begins with, in the order in which templates use them
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")


def table_chunks(num_replicas: int, reported: int = 0) -> int:
    """Entries of a gateway's table: room for what all replicas of one model may report.

    reported: chunks in all reports, which replicas with several models have more of.
    """
    return max(_MIN_CHUNKS, num_replicas * MAX_REPORTED_CHUNKS, reported)


def prompt_chunks(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Chained hashes of the prompt's whole chunks of CHUNK_CHARS, under its model and
    adapters.

    body: a request of any of the APIs. Messages are hashed as JSON, so that roles and tool calls
    count, and the next request of a conversation begins with the chunks of the last one.
    """
    text = "".join(_prompt_parts(body))
    name = str(body.get("model") or "")
    if body.get("lora"):  # adapters beside the one that the model may be
        name += json.dumps(body["lora"], sort_keys=True)
    digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=CHUNK_HASH_BYTES)
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
    """The replicas that hold a chunk, the latest max_chunks of them.

    A replica holds what it has reported, and what it was sent within ROUTED_S. One that reports
    nothing is taken to keep all.
    """

    def __init__(self, max_chunks: int = _MIN_CHUNKS) -> None:
        self._owners: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        # of each replica: when it was sent a chunk
        self._routed_s: dict[str, dict[bytes, float]] = {}
        # of each replica: when it was told to fetch a chunk, and from which other; oldest first
        self._fetches: dict[str, dict[bytes, tuple[float, str]]] = {}
        self._max_chunks = max_chunks
        self._orders: OrderedDict[bytes, list[str]] = OrderedDict()  # of _voters, by first chunk
        self._voters: Set[str] = frozenset()

    def grow(self, max_chunks: int) -> None:
        """Raise the maximum number of chunks; a lower one than now is ignored."""
        self._max_chunks = max(self._max_chunks, max_chunks)

    def add(self, chunks: Sequence[bytes], replica: str, now_s: float = 0.0) -> None:
        """Note that a replica computes these chunks: hashes that include all that is before."""
        routed_s = self._routed_s.setdefault(replica, {})
        for chunk in reversed(chunks):  # the first is the newest: without it, the others are lost
            self._owners.setdefault(chunk, {})[replica] = None
            self._owners.move_to_end(chunk)
            routed_s[chunk] = now_s
        self._shrink()

    def note_fetch(self, chunks: Sequence[bytes], replica: str, source: str, now_s: float) -> None:
        """Record that a replica was told to fetch these chunks from another, the source."""
        fetches = self._fetches.setdefault(replica, {})
        while fetches and now_s - next(iter(fetches.values()))[0] > ROUTED_S:
            del fetches[next(iter(fetches))]
        for chunk in chunks:
            fetches.pop(chunk, None)
            fetches[chunk] = (now_s, source)

    def fetch_source(self, chunks: Sequence[bytes], replica: str, now_s: float) -> str:
        """The replica from which this one may be fetching any of these chunks now, or empty."""
        fetches = self._fetches.get(replica, {})
        found = (fetches[chunk] for chunk in chunks if chunk in fetches)
        return next((source for since_s, source in found if now_s - since_s <= ROUTED_S), "")

    def report(self, held: Sequence[bytes], replica: str, now_s: float) -> None:
        """Note all that a replica holds, each chunk after those before it in its prompt.

        Prompts that it got since are taken to be there. Only what has changed is looked at one by
        one: a report has thousands of chunks, and comes every two seconds.
        """
        routed_s = self._routed_s.setdefault(replica, {})
        reported = frozenset(held)
        fetches = self._fetches.get(replica, {})
        for chunk in fetches.keys() & reported:
            del fetches[chunk]
        for chunk in routed_s.keys() - reported:
            if now_s - routed_s[chunk] > ROUTED_S:
                del routed_s[chunk]
                self._forget(chunk, replica)
        for chunk in reported - routed_s.keys():
            self._owners.setdefault(chunk, {})[replica] = None
            routed_s[chunk] = -math.inf
        deque(map(self._owners.move_to_end, reversed(held)), maxlen=0)  # a loop in C
        self._shrink()

    def _shrink(self) -> None:
        while len(self._owners) > self._max_chunks:
            chunk, owners = self._owners.popitem(last=False)
            for owner in owners:
                del self._routed_s[owner][chunk]

    def drop(self, replica: str) -> None:
        """Forget a replica that has ended."""
        if replica in self._voters:
            self._voters -= {replica}
            self._orders.clear()
        self._fetches.pop(replica, None)
        for chunk in self._routed_s.pop(replica, ()):
            self._forget(chunk, replica)

    def _forget(self, chunk: bytes, replica: str) -> None:
        owners = self._owners[chunk]
        del owners[replica]
        if not owners:
            del self._owners[chunk]

    def cached_chunks(self, chunks: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """The number of first chunks of each replica that has any."""
        found: dict[str, int] = {}
        owners = self._owners.get(chunks[0], {}) if chunks else {}
        having: Set[str] = owners.keys() & replicas
        num_owners = len(owners)
        for count, chunk in enumerate(chunks):
            owners = self._owners.get(chunk, {})
            # they had the chunk before it too, as one hash includes the other: as many are the same
            if len(owners) != num_owners:
                found.update(dict.fromkeys(having - owners.keys(), count))
                having, num_owners = having & owners.keys(), len(owners)
            if not having:
                return found
        return found | dict.fromkeys(having, len(chunks))

    def rank(self, chunks: Sequence[bytes], loads: Mapping[str, int], spill: int) -> list[str]:
        """The replicas, best first.

        loads: requests of each replica, running and waiting. The one with most chunks is first,
        unless it has over `spill` requests more than the least loaded one; then, and without any
        chunk, the least loaded is. Equal ones are ordered by rendezvous hashing of the first chunk,
        so that gateways that know different things choose the same.
        """
        cached = self.cached_chunks(chunks, loads.keys())
        voted = self._by_vote(chunks[0] if chunks else b"", loads)
        having = sorted(filter(cached.__contains__, voted), key=cached.__getitem__, reverse=True)
        others = [replica for replica in voted if replica not in cached]
        # sorts are stable: equal loads stay in the order of chunks, and those in that of votes
        ranked = sorted(having + others, key=loads.__getitem__)
        if having:
            most = [each for each in having if cached[each] == cached[having[0]]]
            best = min(most, key=loads.__getitem__)
            if loads[best] - loads[ranked[0]] <= spill:
                ranked.remove(best)
                ranked.insert(0, best)
        return ranked

    def _by_vote(self, first: bytes, loads: Mapping[str, int]) -> list[str]:
        """The replicas in the order of rendezvous hashing.

        The order of all that were ever ranked is kept, since a hash takes 1 µs, and one ranks parts
        of them in turn.
        """
        if not loads.keys() <= self._voters:
            is_full = len(self._voters) > _MAX_VOTERS
            self._voters = loads.keys() | (() if is_full else self._voters)
            self._orders.clear()
        if first not in self._orders:

            def vote(replica: str) -> bytes:
                return hashlib.blake2b(replica.encode(), key=first, digest_size=8).digest()

            self._orders[first] = sorted(self._voters, key=vote)
            while len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(first)
        return list(filter(loads.__contains__, self._orders[first]))
