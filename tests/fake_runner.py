"""A runner without a model: the next token is a function of all tokens before it.

It computes nothing but checks every call: chunks continue where the cache ends, growth was
requested, limits hold and memory is returned.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq

import numpy as np

from localgen.backends.engine.embeddings import (
    is_last_slice,
    split_into_slices,
    unscheduled_sequences,
)
from localgen.backends.runner.interface import (
    Chunk,
    EmbeddingArray,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    SampledTokens,
)
from localgen.backends.runner.sequence import Sequence, common_prefix_len
from localgen.backends.types import PositionLogprobs, TokenLogprob

VOCAB = 97
END = 0


def next_token(tokens: list[int]) -> int:
    """The model: a fixed function of the whole sequence."""
    return zlib.crc32(bytes(tokens)) % VOCAB


def score_of(tokens: list[int]) -> float:
    """The logprob of the token after these: a fixed function of them."""
    return -float(zlib.crc32(bytes(tokens)))


def generate(prompt: list[int], limit: int, *, ends: bool = True) -> list[int]:
    """The answer to a prompt when it runs alone: up to END or `limit` tokens, prompt included."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if ends and tokens[-1] == END:
            break
    return tokens[len(prompt) :]


def vector_of(tokens: list[int]) -> EmbeddingArray:
    """The embedding of a text: a fixed function of it, [4]."""
    rng = np.random.default_rng(zlib.crc32(bytes(tokens)))
    return rng.normal(size=4).astype(np.float32)


class FakeRunner:
    """ModelRunner with a pool of `kv_tokens`; cached prefixes are evicted as a whole."""

    def __init__(
        self,
        *,
        kv_tokens: int = 256,
        max_seqs: int = 4,
        batch: int = 16,
        outputs: int | None = None,
        rewinds: bool = True,
    ) -> None:
        self.limits = Limits(
            max_seqs=max_seqs,
            max_batch_tokens=batch,
            max_outputs=outputs or batch,
            max_len=kv_tokens,
            kv_tokens=kv_tokens,
            can_rewind=rewinds,
        )
        self.cache: dict[Sequence, list[int]] = {}
        self.room: dict[Sequence, int] = {}
        self.donors: list[list[int]] = []
        self.steps: list[list[tuple[str, int]]] = []
        self.in_flight = False
        self.computed = 0
        self.slices: list[list[list[int]]] = []  # tokens of each text in it
        self.embedding = 0  # batches that are open

    def usage(self) -> PoolUsage:
        used, cached = sum(self.room.values()), sum(map(len, self.donors))
        return PoolUsage(used=used, cached=cached, free=self.limits.kv_tokens - used - cached)

    def _reclaim(self, needed: int) -> bool:
        while self.usage().free < needed and self.donors:
            self.donors.pop(0)
        return self.usage().free >= needed

    def admit(self, seq: Sequence, *, spare: int) -> int:
        assert not self.in_flight
        assert len(self.cache) < self.limits.max_seqs
        cached = self.num_cached(seq.reusable_tokens, seq.cache_salt)
        if sum(self.room.values()) + len(seq.tokens) + spare > self.limits.kv_tokens:
            raise NoRoom
        self._reclaim(len(seq.tokens) + spare)
        self.cache[seq] = seq.tokens[:cached]
        self.room[seq] = len(seq.tokens)
        return cached

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return max((common_prefix_len(s, tokens) for s in self._sources()), default=0)

    def _sources(self) -> list[list[int]]:
        return [*self.cache.values(), *self.donors] if self.limits.can_rewind else []

    def grow(self, seq: Sequence, n: int) -> bool:
        assert not self.in_flight
        needed = len(self.cache[seq]) + n - self.room[seq]
        if needed > 0:
            if not self._reclaim(needed):
                return False
            self.room[seq] += needed
        return True

    def launch(self, chunks: Seq[Chunk]) -> list[Chunk]:
        assert not self.in_flight
        assert 0 < sum(map(len, chunks)) <= self.limits.max_batch_tokens
        assert sum(chunk.num_outputs for chunk in chunks) <= self.limits.max_outputs
        assert len({chunk.seq.id for chunk in chunks}) == len(chunks)
        self.in_flight = True
        self.steps.append([(chunk.seq.id, len(chunk)) for chunk in chunks])
        return list(chunks)

    def collect(self, ticket: list[Chunk]) -> list[SampledTokens]:
        self.in_flight = False
        return [self._compute(chunk) for chunk in ticket]

    def _compute(self, chunk: Chunk) -> SampledTokens:
        cache = self.cache[chunk.seq]
        assert len(cache) == chunk.start, "a chunk continues where the cache ends"
        cache += chunk.tokens
        self.computed += len(chunk)
        assert len(cache) <= self.room[chunk.seq], "room was asked for"
        ends = range(len(cache) - chunk.num_outputs + 1, len(cache) + 1)[: chunk.num_scored]
        scored = tuple(
            PositionLogprobs(TokenLogprob(token, "", score_of(cache[:end])), ())
            for end, token in zip(ends, chunk.scored_tokens, strict=True)
        )
        if not chunk.is_sampled:
            return SampledTokens(scored=scored)
        assert len(cache) - chunk.num_drafts == len(chunk.seq.tokens)
        sampled: list[int] = []
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        for offset in range(chunk.num_drafts + 1):
            sampled.append(next_token(cache[: len(cache) - chunk.num_drafts + offset]))
            if offset < chunk.num_drafts and drafts[offset] != sampled[-1]:
                break
        return SampledTokens(tuple(sampled), scored=scored)

    def rewind(self, seq: Sequence, length: int) -> None:
        assert self.limits.can_rewind
        assert not self.in_flight
        del self.cache[seq][length:]
        self.room[seq] = length

    def release(self, seq: Sequence, *, keep: bool) -> None:
        assert not self.in_flight
        cache = self.cache.pop(seq)
        del self.room[seq]
        if keep and self.limits.can_rewind:
            assert cache[: seq.num_computed] == seq.tokens[: seq.num_computed]
            self.donors.append(seq.tokens[: seq.num_computed])

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        assert inputs
        assert all(0 < len(tokens) <= self.limits.max_len for tokens in inputs)
        seqs = unscheduled_sequences(inputs)
        self.embedding += 1
        try:
            for chunks in split_into_slices(seqs, max_tokens):
                assert not self.in_flight
                assert self.embedding == 1
                self.slices.append([chunk.tokens for chunk in chunks])
                whole = np.stack([vector_of(tokens) for tokens in inputs])
                vectors = whole if is_last_slice(chunks, seqs) else None
                yield EmbedSlice(sum(map(len, chunks)), vectors)
        finally:
            self.embedding -= 1

    def close(self) -> None:
        self.donors.clear()

    def check(self) -> None:
        """Assert that no sequence is left and that the pool's counts add up."""
        assert not self.cache
        assert not self.room
        assert not self.embedding
        usage = self.usage()
        assert usage.used == 0
        assert usage.free >= 0
        assert usage.cached + usage.free == self.limits.kv_tokens
