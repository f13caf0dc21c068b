"""The prefixes that an engine keeps outside of its KV cache: in RAM first, then on disk.

A KV cache asks `find` for a prompt, loads what it lacks, and saves blocks of what it computed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from localgen.backends.engine_stats import KV_TIERS, KVTierStats
from localgen.backends.kv_store.blocks import (
    BLOCK_TOKENS,
    KVBlock,
    State,
    TokenArray,
    chain_digest,
    chain_root,
    token_array,
)
from localgen.backends.kv_store.disk_tier import DiskRemoval, DiskTier
from localgen.backends.kv_store.peer import MAX_PEERS, KVPeer, PeerServer
from localgen.backends.kv_store.ram_tier import RamTier
from localgen.backends.kv_store.rates import ByteRate
from localgen.backends.kv_store.writer import BlockWriter
from localgen.backends.types import RestoredTokens, merged_restored
from localgen.backends.units import format_count

RAM, DISK, PEER = KV_TIERS
# shorter prefixes are saved only if they were used again
MIN_PREFIX_TOKENS = 512
# while the engine computes, it looks so often whether `localgen kv rm` was used
LOOK_S = 5.0
_log = logging.getLogger(__name__)


class FoundBlock(NamedTuple):
    """A stored block that a prompt begins with. length: of its tokens, how many the prompt has.

    peer: has it if it is not stored here.
    """

    digest: bytes
    start: int
    length: int
    peer: KVPeer | None = None


class UnsavedBlock(NamedTuple):
    """Tokens of a prompt that are not stored: those of one block."""

    parent: bytes
    start: int
    tokens: TokenArray

    def is_part_of(self, other: UnsavedBlock) -> bool:
        """True if another block is the same, or begins with this one."""
        count = _common_len(self.tokens, other.tokens)
        return self.parent == other.parent and count == len(self.tokens)


@dataclass(slots=True)
class _TierCounters:
    hit_tokens: int = 0
    saved_ms: float = 0.0


class PrefixStore:
    """Blocks in RAM and on disk. One thread calls it, but for `get` and `has`.

    namespace: see blocks.namespace_of. ram_bytes: limit of the RAM tier. disk: None for no disk.
    connect: to another engine of the model, by its address. default_peer: address of the one that
    is asked for what both tiers lack, or None; a request may name another.
    prefill_per_s: tokens that the engine computes per second, or 0 if unknown. is_shared: other
    engines fetch from it, so a prefix is saved when its request ends, whatever its length.
    count_unsaved, on_cleared: set by the KV cache: tokens that it may still save, and what to
    call when it should save nothing of what it has before a request uses that.
    """

    def __init__(
        self,
        namespace: bytes,
        *,
        ram_bytes: int,
        disk: DiskTier | None,
        connect: Callable[[str], KVPeer] | None = None,
        default_peer: str | None = None,
    ) -> None:
        self.prefill_per_s = 0.0
        self.is_shared = False
        self.count_unsaved: Callable[[], int] = lambda: 0
        self.on_cleared: Callable[[], object] = lambda: None
        self._num_losses = self._num_unwritten_tokens = 0
        self._next_look_s = 0.0
        self._connect, self._default_peer = connect, default_peer
        self._peers: OrderedDict[str, KVPeer] = OrderedDict()  # in order of last use
        self._server: PeerServer | None = None
        self._namespace = namespace
        self._ram = RamTier(ram_bytes)
        self._disk = disk
        self._disk_rate = ByteRate()
        self._writer = BlockWriter(disk, self._ram) if disk is not None else None
        # on disk, and read into RAM while the engine is idle
        self._to_restore = deque(disk.last_used if disk is not None and ram_bytes else ())
        self._last_chain: tuple[str, TokenArray, list[FoundBlock]] = ("", token_array([]), [])
        self._counters = {tier: _TierCounters() for tier in (RAM, DISK, PEER)}
        self._restored: list[RestoredTokens] = []

    # -- finding and loading ----------------------------------------------------------------

    def peer(self, address: str) -> KVPeer | None:
        """The engine at an address, or the default one if that is empty.

        Raises InvalidRequest if it is no address.
        """
        address = address or self._default_peer or ""
        if not address or self._connect is None:
            return None
        if address not in self._peers:
            self._peers[address] = self._connect(address)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end(address)
        return self._peers[address]

    def find(
        self, tokens: list[int], cache_salt: str, *, peer: KVPeer | None = None
    ) -> list[FoundBlock]:
        """The longest stored prefix of a prompt, as blocks in order; the last may be used in part.

        peer: its blocks count too. What a block holds is compared when it is loaded.
        """
        found = self._find(token_array(tokens), cache_salt, peer)
        self._mark_used(found)
        return [block._replace(peer=peer) for block in found]

    def num_stored(self, tokens: list[int], cache_salt: str) -> int:
        """How many leading tokens of a prompt are stored here. None of them counts as used."""
        found = self._find(token_array(tokens), cache_salt, None)
        return found[-1].start + found[-1].length if found else 0

    def _find(self, ids: TokenArray, cache_salt: str, peer: KVPeer | None) -> list[FoundBlock]:
        chain = self._chain(ids, cache_salt)
        found = list(itertools.takewhile(lambda block: self.has(block.digest), chain))
        missing = chain[len(found) :]
        if peer is not None and missing:
            found += missing[: peer.num_held([block.digest for block in missing])]
        start = BLOCK_TOKENS * len(found)
        parent = found[-1].digest if found else chain_root(self._namespace, cache_salt)
        behind = self.children(parent)
        if peer is not None and start < len(ids):
            behind += peer.children(parent)
        best = max(
            (FoundBlock(digest, start, _common_len(held, ids[start:])) for digest, held in behind),
            key=lambda block: block.length,
            default=None,
        )
        if best is not None and best.length:
            found.append(best)
        return found

    def _chain(self, ids: TokenArray, cache_salt: str) -> list[FoundBlock]:
        """The whole blocks of a prompt. Those that it shares with the last one are not hashed."""
        salt, last_ids, last = self._last_chain
        shared = _common_len(last_ids, ids) // BLOCK_TOKENS if salt == cache_salt else 0
        chain = last[:shared]
        parent = chain[-1].digest if chain else chain_root(self._namespace, cache_salt)
        for start in range(BLOCK_TOKENS * len(chain), len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = chain_digest(parent, ids[start : start + BLOCK_TOKENS])
            chain.append(FoundBlock(parent, start, BLOCK_TOKENS))
        self._last_chain = cache_salt, ids, chain
        return chain.copy()

    def _mark_used(self, found: list[FoundBlock]) -> None:
        """Blocks are dropped before those that they follow."""
        for block in reversed(found):
            self._ram.touch(block.digest)
        if found and self._disk is not None and found[-1].digest in self._disk:
            self._disk.touch(found[-1].digest)

    def load(self, found: FoundBlock, tokens: list[int]) -> tuple[KVBlock, str] | None:
        """Return a block and its tier, or None if it is gone, damaged, or not of these tokens."""
        block, tier = self._near(found.digest), RAM
        if block is None and self._disk is not None:
            block, tier = self._read(self._disk, found.digest), DISK
        if block is None and found.peer is not None:
            block, tier = found.peer.fetch(found.digest), PEER
        if block is None or block.start != found.start:
            return None
        if tier == PEER:
            self._add_to_ram(block)
        wanted = tokens[found.start : found.start + found.length]
        return (block, tier) if block.tokens[: found.length].tolist() == wanted else None

    def _read(self, disk: DiskTier, digest: bytes) -> KVBlock | None:
        """Read a block from disk, and measure it."""
        started_s = time.perf_counter()
        block = disk.read(digest)
        if block is not None:
            self._disk_rate.add(block.num_bytes, time.perf_counter() - started_s)
        return block

    def get(self, digest: bytes) -> KVBlock | None:
        """A block that is stored here. May be called from any thread."""
        block = self._near(digest)
        return block if block is not None or self._disk is None else self._disk.read(digest)

    def has(self, digest: bytes) -> bool:
        """True if a block is stored here. May be called from any thread."""
        is_on_disk = self._disk is not None and digest in self._disk
        return is_on_disk or self._near(digest) is not None

    def _near(self, digest: bytes) -> KVBlock | None:
        """A block in RAM, or on its way to the disk."""
        block = self._ram.get(digest)
        return block if block is not None or self._writer is None else self._writer.get(digest)

    def record_restored(self, tier: str, num_tokens: int, ms: float, compute_ms: float) -> None:
        """Record that these tokens were restored in ms. compute_ms: to compute them."""
        saved_ms = max(0.0, compute_ms - ms)
        counters = self._counters[tier]
        counters.hit_tokens += num_tokens
        counters.saved_ms += saved_ms
        self._restored.append(RestoredTokens(tier, num_tokens, ms, saved_ms))

    def take_restored(self) -> tuple[RestoredTokens, ...]:
        """Return the tokens restored since the last call, summed by tier."""
        restored, self._restored = self._restored, []
        return merged_restored(restored)

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks behind a block. May be called from any thread."""
        found = self._ram.children(parent)
        if self._writer is not None:
            found += self._writer.children(parent)
        if self._disk is not None:
            found += self._disk.children(parent)
        return found

    # -- saving -----------------------------------------------------------------------------

    @property
    def num_refused(self) -> int:
        """Number of blocks on disk that were refused: damaged, or of another user or model."""
        return self._disk.num_refused if self._disk is not None else 0

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def is_full(self) -> bool:
        """True if blocks should be saved later, when more of them are on disk."""
        return self._writer is not None and self._writer.is_full

    @property
    def num_losses(self) -> int:
        """Grows when what was saved may have to be saved again.

        Other processes have made room, the disk can be written again, or too much waited for it.
        """
        return self._num_losses + (self._writer.num_recoveries if self._writer else 0)

    @property
    def num_unsaved(self) -> int:
        """Tokens that may have to be written to the disk; 0 without one."""
        return self._writer.num_tokens + self.count_unsaved() if self._writer is not None else 0

    def next_unsaved(
        self,
        tokens: list[int],
        cache_salt: str,
        after: int = 0,
        pending: Sequence[UnsavedBlock] = (),
    ) -> UnsavedBlock | None:
        """The first block of a computed prefix that is not stored, or not on disk yet, or None.

        after: position up to which the caller has saved it. What is no longer stored of that had no
        room, and then there is none for what follows either. pending: blocks that the caller is
        about to save.
        """
        unsaved = self._first_unsaved(tokens, cache_salt, after)
        while unsaved is not None and pending:
            digest = chain_digest(unsaved.parent, unsaved.tokens)
            if not (self._is_kept(digest) or any(map(unsaved.is_part_of, pending))):
                break
            unsaved = self._rest(tokens, digest, unsaved.start + len(unsaved.tokens))
        return None if unsaved is None or unsaved.start < after else unsaved

    def _first_unsaved(self, tokens: list[int], cache_salt: str, after: int) -> UnsavedBlock | None:
        """The first block of a computed prefix that is not stored, or not on disk yet, or None.

        What is stored before `after` counts as saved.
        """
        parent, end = chain_root(self._namespace, cache_salt), 0
        for block in self.find(tokens, cache_salt):
            start, end = block.start, block.start + block.length
            held = token_array(tokens[start : start + BLOCK_TOKENS])
            is_whole = block.length == BLOCK_TOKENS or chain_digest(parent, held) == block.digest
            if is_whole and start >= after and not self._is_kept(block.digest):
                return UnsavedBlock(parent, start, held)
            if not is_whole:  # only a part of the stored block is of this prompt, or the reverse
                return None if end == len(tokens) else self._rest(tokens, parent, start)
            parent = block.digest
        return self._rest(tokens, parent, end)

    def _rest(self, tokens: list[int], parent: bytes, start: int) -> UnsavedBlock | None:
        """The block that begins at a position, unless that is the end."""
        if start == len(tokens):
            return None
        return UnsavedBlock(parent, start, token_array(tokens[start : start + BLOCK_TOKENS]))

    def save(self, unsaved: UnsavedBlock, copy_state: Callable[[], State]) -> bool:
        """Store a block; copy_state returns its keys and values. Returns False if none has room."""
        block = self._ram.get(chain_digest(unsaved.parent, unsaved.tokens))
        if block is None:
            rate = self.prefill_per_s
            block = KVBlock(
                parent=unsaved.parent,
                start=unsaved.start,
                tokens=unsaved.tokens,
                compute_ms=len(unsaved.tokens) / rate * 1e3 if rate else 0.0,
                state=copy_state(),
            )
            self._remove_beginnings_of(block)
            self._add_to_ram(block)
        if self._is_slow(block):
            self._num_unwritten_tokens += len(block.tokens)
        return self._queue(block) or block.digest in self._ram

    def _is_kept(self, digest: bytes) -> bool:
        """True if a block is where it should be: on disk or on its way if it pays, else in RAM."""
        if self._is_on_disk(digest):
            return True
        if self._writer is not None and self._writer.get(digest) is not None:
            return True
        block = self._ram.get(digest)
        return block is not None and (self._writer is None or self._is_slow(block))

    def _is_on_disk(self, digest: bytes) -> bool:
        return self._disk is not None and digest in self._disk

    def _is_slow(self, block: KVBlock) -> bool:
        """True if reading it from disk takes longer than computing it, as far as is known."""
        return 0 < block.compute_ms <= self._disk_rate.ms(block.num_bytes)

    def _queue(self, block: KVBlock) -> bool:
        """Have a block written; returns False without a disk, if it does not pay, or has no room.

        RAM has it, or has dropped it: then it needs room in the queue.
        """
        if self._writer is None:
            return False
        if self._is_slow(block) and self._writer.get(block.digest) is None:
            return False
        lost = self._writer.add(block)
        self._num_losses += bool(lost) and self._writer.is_full
        self._num_unwritten_tokens += sum(len(each.tokens) for each in lost)
        return block.digest not in {each.digest for each in lost}

    def _add_to_ram(self, block: KVBlock) -> None:
        """Add a block to RAM; other blocks that it evicts go to the disk unless they are there."""
        self._ram.add(block)
        while (dropped := self._ram.excess(block)) is not None:
            self._ram.remove(dropped.digest)
            if dropped is not block and not self._is_on_disk(dropped.digest):
                self._queue(dropped)

    def _remove_beginnings_of(self, block: KVBlock) -> None:
        """Remove shorter blocks that hold only the first tokens of this one."""
        for digest, tokens in self.children(block.parent):
            count = len(tokens)
            if count < len(block.tokens) and _common_len(tokens, block.tokens) == count:
                self._ram.remove(digest)
                if self._writer is not None:
                    self._writer.discard(digest)
                if self._disk is not None:
                    self._disk.remove(digest)

    # -- the engine -------------------------------------------------------------------------

    def restore_next(self) -> bool:
        """Read a block that was used last before this start into RAM; False if none is left."""
        while self._to_restore and self._disk is not None:
            digest = self._to_restore.popleft()
            if self._near(digest) is not None:
                continue
            try:
                block = self._disk.read(digest, is_use=False)
            except MemoryError:
                break
            if block is None:
                continue
            if self._ram.add_oldest(block):
                return True
            break  # RAM is full
        self._to_restore.clear()
        return False

    def set_idle(self, is_idle: bool) -> None:
        """Say whether the engine has nothing to compute: then the disk is written.

        To be called between the steps of a busy engine too: so it forgets what the user removes.
        """
        if self._disk is None or self._writer is None:
            return
        if is_idle or self._has_to_forget(self._disk):
            removal = self._disk.refresh()
            self._num_losses += removal is DiskRemoval.EVICTED
            if removal is DiskRemoval.CLEARED:
                self._writer.clear()
                self._ram.clear()
                self._to_restore.clear()
                self.on_cleared()
        self._writer.set_idle(is_idle)

    def _has_to_forget(self, disk: DiskTier) -> bool:
        """True if the disk was cleared. Looks from time to time."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_S
        return disk.is_cleared()

    def on_drained(self, callback: Callable[[], object]) -> None:
        """Have it called, by another thread, when all saved blocks are on disk."""
        if self._writer is not None:
            self._writer.on_drained = callback

    def listen(self, address: tuple[str, int] | str, key: bytes) -> None:
        """Let other engines fetch blocks at this address. Raises OSError."""
        self._server = PeerServer(address, self._namespace, key, self)
        self.is_shared = True

    @property
    def address(self) -> str | None:
        """Where others fetch blocks, or None."""
        return None if self._server is None else self._server.address

    def hurry(self) -> None:
        """Write to the disk from now on, since the engine ends. May be called by any thread."""
        if self._writer is not None:
            self._writer.hurry()

    def close(self, deadline_s: float) -> None:
        """Write what waits for the disk, until the deadline (monotonic seconds)."""
        if self._writer is not None:
            self._writer.close(max(deadline_s, time.monotonic()))
            if unsaved := self.num_unsaved:
                reason = self._writer.error or "there was no time for them"
                count = format_count(unsaved, "token")
                _log.warning("%s of prefixes were not written to disk: %s", count, reason)
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()

    def stats(self) -> tuple[KVTierStats, ...]:
        """The tiers that are not switched off."""
        tiers = []
        if limit := self._ram.limit_bytes:
            tiers.append(self._tier_stats(RAM, len(self._ram), self._ram.num_bytes, limit))
        if self._disk is not None and self._writer is not None:
            size, limit = self._disk.num_bytes, self._disk.limit_bytes
            disk = self._tier_stats(DISK, len(self._disk), size, limit, self._writer.error)
            unwritten = self._num_unwritten_tokens + self._writer.num_unwritten_tokens
            tiers.append(
                replace(disk, unsaved_tokens=self.num_unsaved, unwritten_tokens_total=unwritten)
            )
        if self._default_peer is not None or self._peers:
            resting = (
                peer.error
                for address, peer in self._peers.items()
                if peer.is_resting or address == self._default_peer
            )
            error = next(filter(None, resting), "")
            tiers.append(self._tier_stats(PEER, 0, 0, 0, error))
        return tuple(tiers)

    def _tier_stats(
        self, tier: str, blocks: int, num_bytes: int, limit: int, error: str = ""
    ) -> KVTierStats:
        counters = self._counters[tier]
        return KVTierStats(
            tier=tier,
            blocks=blocks,
            num_bytes=num_bytes,
            limit_bytes=limit,
            hit_tokens_total=counters.hit_tokens,
            saved_s_total=counters.saved_ms / 1e3,
            refused_total=self.num_refused if tier == DISK else 0,
            error=error,
        )


def _common_len(a: TokenArray, b: TokenArray) -> int:
    """Number of leading tokens that two arrays share."""
    count = min(len(a), len(b))
    differs = np.flatnonzero(a[:count] != b[:count])
    return int(differs[0]) if len(differs) else count
