"""The buffers that llama.cpp has allocated, as it tells in its log."""

from __future__ import annotations

import re
from collections import Counter

from localgen.backends.model_info import MemoryUse

_LINE = re.compile(r"(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_MIB = 1 << 20


class Buffers:
    """Bytes by kind, to a hundredth of a MiB, on all devices together."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def take(self, line: str) -> None:
        """A line of the log, of whatever it tells."""
        match = _LINE.search(line)
        if match:
            self._bytes[match[1]] += round(float(match[2]) * _MIB)

    def use(self) -> MemoryUse:
        """What has been allocated for a model and its context."""
        return MemoryUse(
            weights=self._bytes["model"],
            kv=self._bytes["KV"] + self._bytes["RS"],
            work=self._bytes["compute"] + self._bytes["output"],
        )
