"""When an engine loads prefixes from its store, and when it saves them there."""

from __future__ import annotations

import time
from collections.abc import Callable

from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import TieredRunner
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import RestoredTokens

# in each step, loading a prompt holds up the answers that run beside it for about this time
LOAD_BESIDE_OTHERS_S = 0.02
# a cancellation of a prompt that is alone waits for this time
LOAD_ALONE_S = 0.25
# of the time of an engine that is not idle; where the writer cannot wait for an idle one either, it
# takes 1.3 times that on a core, so that both take about 2 % at most
MAX_SAVING_SHARE = 0.0075


class PrefixTiers:
    """The store of a runner's prefixes, used by one engine thread."""

    def __init__(
        self,
        runner: TieredRunner,
        store: PrefixStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self.store = runner, store
        self._clock = clock
        self._loading: dict[Sequence, None] = {}  # in the order of their admission
        self._next_save_s = 0.0

    # -- loading ----------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> None:
        """Note an admitted sequence."""
        if self._runner.is_loading(seq):
            self._loading[seq] = None

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that is about to be released."""
        self._loading.pop(seq, None)

    def is_loading(self, seq: Sequence) -> bool:
        """True if stored tokens are left to load: no chunk of it may be planned."""
        return seq in self._loading

    def load(self, num_running: int) -> tuple[Sequence, int, tuple[RestoredTokens, ...]] | None:
        """Load a slice of the first sequence that has something to load.

        num_running: admitted sequences, loading or not. Returns the sequence, how many of its
        leading tokens are in the KV cache now, and what was restored.
        """
        seq = next(iter(self._loading), None)
        if seq is None:
            return None
        is_alone = num_running == len(self._loading)
        until_s = self._clock() + (LOAD_ALONE_S if is_alone else LOAD_BESIDE_OTHERS_S)
        num_loaded = self._runner.load_prefix(seq, until_s)
        if not self._runner.is_loading(seq):
            del self._loading[seq]
        return seq, num_loaded, self.store.take_restored()

    # -- saving, and restoring while idle ---------------------------------------------------

    def prepare(self) -> bool:
        """Save or restore a block while the engine is idle; returns False if none is left."""
        return self._runner.save_next_block() or self.store.restore_next()

    def save_while_busy(self) -> None:
        """Save a block between two steps; looking for one counts as saving."""
        started_s = self._clock()
        if started_s >= self._next_save_s:
            self._runner.save_next_block()
            ended_s = self._clock()
            self._next_save_s = ended_s + (ended_s - started_s) / MAX_SAVING_SHARE

    def set_idle(self, is_idle: bool) -> None:
        """Say whether the engine has nothing to compute: then the disk is written."""
        self.store.set_idle(is_idle)

    def save_all(self, deadline_s: float) -> None:
        """Write what is left to the disk, until a deadline (monotonic seconds), and close it."""
        self.store.hurry()
        while self.store.has_disk and time.monotonic() < deadline_s:
            if self._runner.save_next_block():
                continue
            if not self.store.is_full:
                break
            time.sleep(0.01)  # the disk is slower
        self.store.close(deadline_s)
