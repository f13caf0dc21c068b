"""Writes blocks to disk behind the engine: while it is idle, or when too many wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict

from localgen.backends.kv_store.blocks import KVBlock, TokenArray
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.rates import ByteRate

# blocks that wait for the disk, besides those of the RAM tier
MAX_WAITING_BYTES = 256 << 20
_log = logging.getLogger(__name__)


class BlockWriter:
    """A queue of blocks to write, and the thread that writes them. Thread-safe.

    error: why no more are written, or empty.
    """

    def __init__(self, disk: DiskTier, rate: ByteRate) -> None:
        self.error = ""
        self._disk, self._rate = disk, rate
        self._waiting: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_idle = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    def add(self, block: KVBlock) -> bool:
        """Queue a block; returns False if it cannot be written."""
        with self._changed:
            if self.error or self._waiting_bytes + block.num_bytes > MAX_WAITING_BYTES:
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

    def close(self, deadline_s: float) -> None:
        """Write what waits, until the deadline (monotonic seconds), and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _may_write(self) -> bool:
        """Half a queue that waits means that the engine is never idle."""
        is_pressed = self._waiting_bytes > MAX_WAITING_BYTES // 2
        return bool(self._waiting) and (self._is_idle or self._is_closing or is_pressed)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._may_write() or self._is_closing)
                if not self._waiting:
                    return
                digest, block = next(iter(self._waiting.items()))
            try:
                with self._rate.measure(block.num_bytes):
                    self._disk.write(block)
            except OSError as error:
                _log.error("the KV cache is not kept on disk any more: %s", error)
                with self._changed:
                    self.error = error.strerror or str(error)
                    self._waiting.clear()
                    self._waiting_bytes = 0
                return
            with self._changed:
                self._pop(digest)

    def _pop(self, digest: bytes) -> None:
        block = self._waiting.pop(digest, None)
        if block is not None:
            self._waiting_bytes -= block.num_bytes
