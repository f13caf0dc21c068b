"""Writes blocks to disk behind the engine: while it is idle, or when too many wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict

from localgen.backends.kv_store.blocks import KVBlock, TokenArray
from localgen.backends.kv_store.disk_tier import DiskTier, NoRoomForBlock

# blocks that wait for the disk, besides those of the RAM tier
MAX_WAITING_BYTES = 256 << 20
# after an error, such as a full disk, nothing is written for this time
RETRY_S = 60.0
_log = logging.getLogger(__name__)


class BlockWriter:
    """A queue of blocks to write, and the thread that writes them. Thread-safe.

    error: why none are written now, or empty.
    """

    def __init__(self, disk: DiskTier) -> None:
        self.error = ""
        self._retry_s = 0.0
        self._disk = disk
        self._waiting: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_idle = self._is_hurried = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if so much waits that it is written even while the engine computes."""
        return self._waiting_bytes > MAX_WAITING_BYTES // 2

    @property
    def is_resting(self) -> bool:
        """True after an error."""
        return bool(self.error) and time.monotonic() < self._retry_s

    def add(self, block: KVBlock) -> bool:
        """Queue a block; returns False if it cannot be written."""
        with self._changed:
            has_room = self._waiting_bytes + block.num_bytes <= MAX_WAITING_BYTES
            if self.is_resting or not has_room:
                return False
            if block.digest not in self._waiting:
                self._waiting[block.digest] = block
                self._waiting_bytes += block.num_bytes
                self._changed.notify()
            return True

    def get(self, digest: bytes) -> KVBlock | None:
        """A block that is not written yet."""
        with self._changed:
            return self._waiting.get(digest)

    def children(self, parent: bytes) -> list[tuple[bytes, TokenArray]]:
        """Digest and tokens of the blocks behind a block that are not written yet."""
        with self._changed:
            return [
                (digest, block.tokens)
                for digest, block in self._waiting.items()
                if block.parent == parent
            ]

    def discard(self, digest: bytes) -> None:
        """Do not write a block that another one replaces."""
        with self._changed:
            self._pop(digest)

    def set_idle(self, is_idle: bool) -> None:
        """Say whether the engine has nothing to compute."""
        if is_idle == self._is_idle:
            return
        with self._changed:
            self._is_idle = is_idle
            self._changed.notify()

    def hurry(self) -> None:
        """Write from now on whether the engine is idle or not: it is about to end."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify()

    def close(self, deadline_s: float) -> None:
        """Write what waits, until the deadline (monotonic seconds), and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _may_write(self) -> bool:
        is_due = self._is_idle or self._is_hurried or self._is_closing or self.is_full
        return bool(self._waiting) and is_due

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._may_write() or self._is_closing)
                if not self._waiting:
                    return
                digest, block = next(iter(self._waiting.items()))
            try:
                self._disk.write(block)
            except NoRoomForBlock:
                pass
            except (OSError, MemoryError) as error:
                self._rest(getattr(error, "strerror", None) or str(error) or "out of memory")
                continue
            with self._changed:
                self.error = ""
                self._pop(digest)

    def _rest(self, reason: str) -> None:
        """Write nothing for a while."""
        if reason != self.error:
            _log.error("prefixes are not kept on disk now: %s", reason)
        with self._changed:
            self.error, self._retry_s = reason, time.monotonic() + RETRY_S
            self._waiting.clear()
            self._waiting_bytes = 0

    def _pop(self, digest: bytes) -> None:
        block = self._waiting.pop(digest, None)
        if block is not None:
            self._waiting_bytes -= block.num_bytes
