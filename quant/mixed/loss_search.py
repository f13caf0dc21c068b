"""The smallest file within a measured loss: each file is aimed by what the one before measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from localgen.quant.files.safetensors_writer import atomic_write
from localgen.quant.mixed.search import Mixture, Options, fit_kl, total_bytes, total_kl

# files measured for one target; each takes a quantization and an evaluation
_MAX_FILES = 3
# a measured loss from here to the target is close enough
_CLOSE = 0.9
# the next file aims at this part of the target
_AIM = 0.96


@dataclass(frozen=True, slots=True)
class MeasuredFile:
    """kl: KL divergence from the original in nats."""

    mixture: Mixture
    kl: float


class LossSearch:
    """Files to write and measure for one target, in nats.

    candidate: the next file; None when the search has ended. measured: files so far. record: keeps
    their losses, so that an interrupted search continues with the next file.
    """

    def __init__(self, options: Options, target: float, record: Path) -> None:
        self._options, self._target, self._record = options, target, record
        self.measured: list[MeasuredFile] = []
        self.candidate: Mixture | None = fit_kl(options, target)
        if record.is_file():
            for kl in json.loads(record.read_text(encoding="utf-8")):
                self._append(kl)

    def add(self, kl: float) -> None:
        """Record the measured loss of the candidate, and choose the next one."""
        self._append(kl)
        with atomic_write(self._record) as path:
            path.write_text(json.dumps([one.kl for one in self.measured]), encoding="utf-8")

    @property
    def best(self) -> MeasuredFile:
        """The smallest file within the target, or the one with the least loss."""
        met = [one for one in self.measured if one.kl <= self._target]
        if met:
            return min(met, key=lambda one: total_bytes(one.mixture))
        return min(self.measured, key=lambda one: one.kl)

    def _append(self, kl: float) -> None:
        assert self.candidate is not None
        self.measured.append(MeasuredFile(self.candidate, kl))
        self.candidate = self._next_candidate()

    def _next_candidate(self) -> Mixture | None:
        last = self.measured[-1]
        if len(self.measured) >= _MAX_FILES or _CLOSE * self._target <= last.kl <= self._target:
            return None
        aimed = total_kl(last.mixture) * _AIM * self._target / last.kl
        following = fit_kl(self._options, aimed)
        return None if following in [one.mixture for one in self.measured] else following
