"""Which prompts an engine still has, by hashes of their text, as the gateway of a cluster asks."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.types import CHUNK_HASH_BYTES, MAX_REPORTED_CHUNKS

# of all prompts together, the least recently used are not reported
MAX_TOKENS = 2 << 20
CHECK_PERIOD_S = 0.25
# of a check, but at least one prompt is looked up
_CHECK_S = 0.002


@dataclass(slots=True)
class _Prompt:
    """hashes: of the chunks that are held. num_chunks: of the whole prompt. seq: until it ends."""

    hashes: tuple[bytes, ...]
    num_chunks: int
    tokens: array[int]
    cache_salt: str
    seq: Sequence | None


class HeldPrompts:
    """Looks up the prompts of a cluster in the KV cache and in its tiers, some at a time.

    A prompt counts as held from its arrival, and until it is looked up without success. The share
    of its tokens that is held is taken for the share of its chunks, to the nearest one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PrefixStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._store, self._clock = runner, store, clock
        # by their last chunk, in order of last use
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._unchecked: deque[bytes] = deque()
        self._next_check_s = 0.0
        self._num_tokens, self._has_changed = 0, False

    def add(self, seq: Sequence) -> None:
        """Note a prompt that is queued, unless it has no chunks."""
        if seq.chunks is None:
            return
        hashes = seq.chunks.hashes
        for each in hashes:  # a prompt that this one continues, or the same again
            self._remove(each)
        tokens = array("i", seq.tokens[: seq.num_prompt])
        self._insert(_Prompt(hashes, seq.chunks.count, tokens, seq.cache_salt, seq))
        while self._num_tokens > MAX_TOKENS:
            self._remove(next(iter(self._prompts)))

    def _insert(self, prompt: _Prompt) -> None:
        self._prompts[prompt.hashes[-1]] = prompt
        self._num_tokens += len(prompt.tokens)
        self._has_changed = True

    def _remove(self, key: bytes) -> None:
        if prompt := self._prompts.pop(key, None):
            self._num_tokens -= len(prompt.tokens)
            self._has_changed = True

    def check(self) -> None:
        """Look up some prompts that have ended. No step may be in flight."""
        now_s = self._clock()
        if now_s < self._next_check_s or not self._prompts:
            return
        self._next_check_s = now_s + CHECK_PERIOD_S
        if not self._unchecked:
            self._unchecked.extend(self._prompts)
        while self._unchecked:
            self._check(self._unchecked.popleft())
            if self._clock() - now_s >= _CHECK_S:
                break

    def _check(self, key: bytes) -> None:
        prompt = self._prompts.get(key)
        if prompt is None:
            return
        if prompt.seq is not None:
            if prompt.seq.state is not SequenceState.ENDED:
                return
            prompt.seq = None
        tokens = prompt.tokens.tolist()
        held = self._runner.num_cached(tokens, prompt.cache_salt)
        if self._store is not None and held < len(tokens):
            held = max(held, self._store.num_stored(tokens, prompt.cache_salt))
        count = round(prompt.num_chunks * held / len(tokens))
        if count >= len(prompt.hashes):
            return
        self._remove(key)
        if count and prompt.hashes[count - 1] not in self._prompts:
            prompt.hashes = prompt.hashes[:count]
            self._insert(prompt)
            self._prompts.move_to_end(prompt.hashes[-1], last=False)

    def take_report(self) -> bytes | None:
        """At most MAX_REPORTED_CHUNKS that are held, newest first; None if they are the same.

        Before each chunk come those before it in its prompt.
        """
        if not self._has_changed:
            return None
        self._has_changed = False
        found: dict[bytes, None] = {}
        for key in reversed(self._prompts):
            found.update(dict.fromkeys(self._prompts[key].hashes))
            if len(found) >= MAX_REPORTED_CHUNKS:
                break
        return b"".join(found)[: MAX_REPORTED_CHUNKS * CHUNK_HASH_BYTES]
