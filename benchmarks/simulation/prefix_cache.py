"""The prefixes that a replica keeps in its KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.simulation.cells import Cells
from benchmarks.simulation.costs import SLOTS, EngineCosts
from benchmarks.simulation.request import Segment
from localgen.backends.llamacpp.shared_cache import MAX_CACHED_TOKENS, MIN_CACHED_PREFIXES
from localgen.backends.memory.load_defaults import LLAMACPP_DEFAULTS


class PrefixCache(Protocol):
    """A KV cache of limited tokens, shared by running sequences and kept prefixes."""

    def scanned_cells(self, uncomputed: Mapping[int, int]) -> int:
        """Cells that attention passes over, whosever they are. uncomputed: see Cells."""
        ...

    def cached_tokens(self, segments: Sequence[Segment]) -> int:
        """Tokens of the first segments that are in the cache."""
        ...

    def admit(self, segments: Sequence[Segment]) -> bool:
        """Hold the segments of a sequence, its answer included. Returns False if there is no
        room: nothing has changed then."""
        ...

    def release(self, segments: Sequence[Segment]) -> None:
        """The sequence has ended: its segments are kept while there is room."""
        ...


class _Held:
    """Segments with the number of their holders, and the tokens of all."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self.tokens = 0

    def __contains__(self, key: int) -> bool:
        return key in self._holders

    def add(self, segment: Segment) -> None:
        count = self._holders.get(segment.key, 0)
        self._holders[segment.key] = count + 1
        if not count:
            self.tokens += segment.tokens

    def remove(self, segment: Segment) -> bool:
        """Returns True if that was the last holder."""
        count = self._holders[segment.key] - 1
        if count:
            self._holders[segment.key] = count
            return False
        del self._holders[segment.key]
        self.tokens -= segment.tokens
        return True


class BlockCache:
    """Pages of blocks, as the CUDA backend has: the least recently used segments are evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running = _Held()
        self._kept: OrderedDict[int, int] = OrderedDict()  # tokens by key, oldest first
        self._kept_tokens = 0

    def scanned_cells(self, uncomputed: Mapping[int, int]) -> int:
        return 0  # it reads the pages of a sequence only

    def cached_tokens(self, segments: Sequence[Segment]) -> int:
        total = 0
        for key, tokens in segments:
            if key not in self._running and key not in self._kept:
                break
            total += tokens
        return total

    def admit(self, segments: Sequence[Segment]) -> bool:
        new = sum(tokens for key, tokens in segments if key not in self._running)
        if self._running.tokens + new > self._capacity:
            return False
        for segment in segments:
            self._running.add(segment)
            self._kept_tokens -= self._kept.pop(segment.key, 0)
        while self._running.tokens + self._kept_tokens > self._capacity:
            self._kept_tokens -= self._kept.popitem(last=False)[1]
        return True

    def release(self, segments: Sequence[Segment]) -> None:
        for segment in reversed(segments):  # the end of a prompt is evicted before its begin
            if self._running.remove(segment):
                self._kept[segment.key] = segment.tokens
                self._kept_tokens += segment.tokens


class SlotCache:
    """llama.cpp's shared context: whole sequences are kept, the newest ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._cells = capacity, Cells(capacity)
        self._running = _Held()
        self._held = _Held()  # by running sequences and kept ones
        self._kept: OrderedDict[tuple[Segment, ...], int] = OrderedDict()  # oldest first

    def scanned_cells(self, uncomputed: Mapping[int, int]) -> int:
        return self._cells.num_scanned(uncomputed)

    def cached_tokens(self, segments: Sequence[Segment]) -> int:
        total = 0
        for key, tokens in segments:
            if key not in self._held:
                break
            total += tokens
        return total

    def admit(self, segments: Sequence[Segment]) -> bool:
        new = sum(tokens for key, tokens in segments if key not in self._running)
        if self._running.tokens + new > self._capacity:
            return False
        added = [segment for segment in segments if segment.key not in self._held]
        for segment in segments:
            self._running.add(segment)
            self._held.add(segment)
        while self._held.tokens > self._capacity:
            self._evict(next(iter(self._kept)))
        for segment in added:
            self._cells.take(segment)
        return True

    def release(self, segments: Sequence[Segment]) -> None:
        entry = tuple(segments)
        for kept in [each for each in self._kept if each == entry[: len(each)]]:
            self._evict(kept)  # it serves no request that this one does not serve
        self._kept[entry] = sum(tokens for _, tokens in entry)
        for segment in segments:
            self._running.remove(segment)
        while self._exceeds_limits():
            self._evict(next(iter(self._kept)))

    def _exceeds_limits(self) -> bool:
        count = len(self._kept)
        if count > LLAMACPP_DEFAULTS.num_cached_prefixes:
            return True
        return count > MIN_CACHED_PREFIXES and sum(self._kept.values()) > MAX_CACHED_TOKENS

    def _evict(self, entry: tuple[Segment, ...]) -> None:
        del self._kept[entry]
        for segment in entry:
            if self._held.remove(segment):
                self._cells.free(segment.key)


def create_cache(costs: EngineCosts) -> PrefixCache:
    return SlotCache(costs.kv_tokens) if costs.cache == SLOTS else BlockCache(costs.kv_tokens)
