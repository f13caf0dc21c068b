"""Sampling parameters of the running sequences, in arrays that steps take their rows from."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from localgen.backends.cuda.kernels.sampling.gumbel import hash_seed
from localgen.backends.cuda.kernels.sampling.sample import SamplingTensors
from localgen.backends.cuda.model.batch import Int64Array
from localgen.backends.cuda.model.host_copy import to_device
from localgen.backends.sampling_params import SamplingParams

_MIN_TEMPERATURE = 1e-6
_MAX_TOP_K = 2**31 - 1
_MIN_SLOTS = 8
# the rows of the float32 array, as named in SamplingParams
_FLOAT_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_float_params = attrgetter(*_FLOAT_NAMES)


@dataclass(slots=True, eq=False)
class _SentParams:
    """Parameters on the device, of rows with these slots and positions."""

    slots: Int64Array
    positions: Int64Array
    tensors: SamplingTensors


class SamplingSlots:
    """Sampling parameters by slot, written when a sequence is admitted.

    The parameters of a step stay on the device while the next ones have the same rows.
    """

    def __init__(self) -> None:
        self._seed_hashes = np.zeros(_MIN_SLOTS, np.int64)
        self._floats = np.zeros((len(_FLOAT_NAMES), _MIN_SLOTS), np.float32)
        self._top_k = np.zeros(_MIN_SLOTS, np.int32)
        self._sent: _SentParams | None = None

    def set(self, slot: int, params: SamplingParams) -> None:
        """Set the parameters of a slot."""
        missing = slot + 1 - len(self._top_k)
        if missing > 0:
            added = max(missing, len(self._top_k))
            self._seed_hashes = np.pad(self._seed_hashes, (0, added))
            self._floats = np.pad(self._floats, ((0, 0), (0, added)))
            self._top_k = np.pad(self._top_k, (0, added))
        self._seed_hashes[slot] = hash_seed(params.seed or 0)
        self._floats[:, slot] = _float_params(params)
        if params.temperature:
            # float32 rounding must not turn a tiny temperature into 0, which means greedy
            self._floats[0, slot] = max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[slot] = min(params.top_k or 0, _MAX_TOP_K)
        self._sent = None

    def tensors(
        self, slots: Int64Array, positions: Int64Array, device: torch.device
    ) -> SamplingTensors:
        """The parameters of rows, on the device, without edits; valid until the next call.

        slots, positions: int64 [rows]; the position is that of the token to sample.
        """
        sent = self._sent
        if (
            sent is not None
            and np.array_equal(sent.slots, slots)
            and np.array_equal(sent.positions + 1, positions)
        ):
            sent.tensors.position.add_(1)
            sent.slots, sent.positions = slots, positions
        else:
            sent = self._sent = _SentParams(slots, positions, self._send(slots, positions, device))
        return sent.tensors

    def following_tensors(self, slots: Int64Array) -> SamplingTensors | None:
        """The parameters of the rows sent last, one position on; None if these are others.

        slots: the array of that call, not a copy.
        """
        sent = self._sent
        if sent is None or sent.slots is not slots:
            return None
        sent.tensors.position.add_(1)
        sent.positions += 1
        return sent.tensors

    def _send(
        self, slots: Int64Array, positions: Int64Array, device: torch.device
    ) -> SamplingTensors:
        wholes, floats, top_k = to_device(
            [
                np.stack([self._seed_hashes[slots], positions]),
                self._floats[:, slots],
                self._top_k[slots],
            ],
            device,
        )
        no_rows = torch.empty(0, dtype=torch.int32, device=device)
        no_values = torch.empty(0, dtype=torch.float32, device=device)
        return SamplingTensors(
            **dict(zip(_FLOAT_NAMES, floats.unbind(), strict=True)),
            top_k=top_k,
            seed_hash=wholes[0],
            position=wholes[1],
            edit_rows=no_rows,
            edit_tokens=no_rows,
            edit_counts=no_values,
            edit_biases=no_values,
        )
