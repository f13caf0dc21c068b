"""Writes blocks to disk behind the engine: while it is idle, or when too many wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from localgen.backends.kv_store.blocks import KVBlock, TokenArray
from localgen.backends.kv_store.disk_tier import DiskCleared, DiskTier, NoRoomForBlock
from localgen.backends.kv_store.ram_tier import RamTier

# memory of blocks that wait for the disk, besides the RAM tier
MAX_WAITING_BYTES = 256 << 20
# after an error, such as a full disk, nothing is written for this time
RETRY_S = 60.0
_log = logging.getLogger(__name__)


class BlockWriter:
    """A queue of blocks to write, and the thread that writes them. Thread-safe.

    ram: the thread that changes it calls `add`; a block that is there takes no room in the queue.
    on_drained: called by that thread when it has written all. error: why none are written now, or
    empty. num_recoveries: how often writing has worked again after an error. num_unwritten_tokens:
    those that the disk had no room for.
    """

    def __init__(self, disk: DiskTier, ram: RamTier) -> None:
        self.on_drained: Callable[[], object] = lambda: None
        self.error = ""
        self.num_recoveries = self.num_unwritten_tokens = 0
        self._retry_s = 0.0
        self._disk, self._ram = disk, ram
        self._waiting: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_idle = self._is_hurried = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if so much waits that it is written even while the engine computes.

        False while nothing is written.
        """
        return self._waiting_bytes > MAX_WAITING_BYTES // 2 and not self.is_resting

    @property
    def is_resting(self) -> bool:
        """True after an error, for RETRY_S."""
        return bool(self.error) and time.monotonic() < self._retry_s

    @property
    def num_tokens(self) -> int:
        """Tokens that are not written yet."""
        with self._changed:
            return sum(len(block.tokens) for block in self._waiting.values())

    def add(self, block: KVBlock) -> list[KVBlock]:
        """Queue a block, or keep it in the queue when RAM drops it.

        Returns the blocks for which there is no room then, this one or others. They leave the
        queue; ends of prefixes go before what they follow.
        """
        with self._changed:
            if block.digest not in self._waiting:
                self._waiting[block.digest] = block
                self._waiting_bytes += block.num_bytes
                self._changed.notify()
            waiting = self._waiting.items()
            own = [each for digest, each in waiting if digest not in self._ram]
            excess = sum(each.num_bytes for each in own) - MAX_WAITING_BYTES
            lost = []
            while excess > 0:
                lost.append(max(own, key=lambda each: each.start))
                own.remove(lost[-1])
                self._pop(lost[-1].digest)
                excess -= lost[-1].num_bytes
            return lost

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

    def clear(self) -> None:
        """Write nothing of what waits."""
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0

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

    def _next(self) -> KVBlock | None:
        """Wait until a block is to be written; None at the end."""
        with self._changed:
            while not (self._is_closing or self._is_due()):
                rest_s = self._retry_s - time.monotonic()
                self._changed.wait(rest_s if rest_s > 0 else None)
            return next(iter(self._waiting.values()), None)

    def _is_due(self) -> bool:
        is_time = self._is_idle or self._is_hurried or self.is_full
        return bool(self._waiting) and is_time and not self.is_resting

    def _run(self) -> None:
        while (block := self._next()) is not None:
            is_written = False
            try:
                self._disk.write(block)
                is_written = True
            except DiskCleared:
                pass
            except NoRoomForBlock:
                self.num_unwritten_tokens += len(block.tokens)
            except (OSError, MemoryError) as error:
                self._rest(error)
                if self._is_closing:
                    return
                continue
            except Exception as error:  # of this block: the others are written all the same
                self._rest(error)
                self.num_unwritten_tokens += len(block.tokens)
            with self._changed:
                if is_written:
                    self.num_recoveries += bool(self.error)
                    self.error = ""
                self._pop(block.digest)
                is_drained = not self._waiting
            if is_drained:
                self.on_drained()

    def _rest(self, error: Exception) -> None:
        """Write nothing for a while."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if reason != self.error:
            is_known = isinstance(error, (OSError, MemoryError))
            _log.error("prefixes are not kept on disk now: %s", reason, exc_info=not is_known)
        with self._changed:
            self.error, self._retry_s = reason, time.monotonic() + RETRY_S

    def _pop(self, digest: bytes) -> None:
        block = self._waiting.pop(digest, None)
        if block is not None:
            self._waiting_bytes -= block.num_bytes
