"""Blocks in memory, in order of last use, within a limit."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from localgen.backends.kv_store.blocks import KVBlock, TokenArray


class RamTier:
    """The blocks of one namespace in memory. One thread changes it, any may call get and children.

    limit_bytes: 0 for no tier. num_bytes: of all blocks.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.num_bytes = limit_bytes, 0
        self._blocks: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._children: defaultdict[bytes, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def get(self, digest: bytes) -> KVBlock | None:
        return self._blocks.get(digest)

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks behind a block."""
        behind = [self._blocks.get(each) for each in tuple(self._children.get(parent, ()))]
        return [(block.digest, block.tokens) for block in behind if block is not None]

    def touch(self, digest: bytes) -> None:
        """Note that a block was used, if it is here."""
        if digest in self._blocks:
            self._blocks.move_to_end(digest)

    def add(self, block: KVBlock) -> None:
        """Add a block, unless the tier is switched off; then `excess` may be dropped."""
        if self.limit_bytes:
            self._blocks[block.digest] = block
            self._children[block.parent].add(block.digest)
            self.num_bytes += block.num_bytes

    def add_oldest(self, block: KVBlock) -> bool:
        """Add a block that was used before all others; returns False if it has no room."""
        if self.num_bytes + block.num_bytes > self.limit_bytes:
            return False
        self.add(block)
        self._blocks.move_to_end(block.digest, last=False)
        return True

    def excess(self, newest: KVBlock) -> KVBlock | None:
        """The block to drop next, or None within the limit.

        It is the least recently used one, but the newest goes before those that it follows.
        """
        if self.num_bytes <= self.limit_bytes:
            return None
        oldest = next(iter(self._blocks.values()))
        return newest if oldest.digest == newest.parent else oldest

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._children.clear()
        self.num_bytes = 0

    def remove(self, digest: bytes) -> None:
        """Remove a block if it is here."""
        block = self._blocks.pop(digest, None)
        if block is None:
            return
        self.num_bytes -= block.num_bytes
        self._children[block.parent].discard(digest)
        if not self._children[block.parent]:
            del self._children[block.parent]
