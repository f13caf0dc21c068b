"""A llama_batch backed by numpy arrays, which are filled by slices instead of per element."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.runner.interface import Chunk


class LlamaBatch:
    """Tokens of one step. Output rows are in the order of the chunks."""

    def __init__(self, max_tokens: int) -> None:
        self._token = np.zeros(max_tokens, np.int32)
        self._pos = np.zeros(max_tokens, np.int32)
        self._seq = np.zeros(max_tokens, np.int32)
        self._num_seqs = np.ones(max_tokens, np.int32)
        self._output = np.zeros(max_tokens, np.int8)
        # each token belongs to one sequence: its pointer always addresses its own entry of _seq
        self._seq_pointers = self._seq.ctypes.data + 4 * np.arange(max_tokens, dtype=np.uintp)
        self._positions = np.arange(max_tokens, dtype=np.int32)
        self.native = C.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._num_seqs, ctypes.c_int32),
            seq_id=ctypes.cast(
                self._seq_pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
            ),
            logits=_pointer(self._output, ctypes.c_int8),
        )

    def fill(self, chunks: Sequence[Chunk], seq_ids: Sequence[int]) -> list[int]:
        """Write one step. Returns the batch index of the first sampled position of each chunk.

        In a chunk that is not sampled, that is the index after its last. seq_ids: llama.cpp's
        sequence id of each chunk.
        """
        end = 0
        rows = []
        for chunk, seq_id in zip(chunks, seq_ids, strict=True):
            begin, end = end, end + len(chunk)
            self._token[begin:end] = chunk.tokens
            self._pos[begin:end] = self._positions[: len(chunk)]
            self._pos[begin:end] += chunk.start
            self._seq[begin:end] = seq_id
            self._output[begin:end] = 0
            self._output[end - chunk.num_outputs : end] = 1
            rows.append(end - chunk.num_outputs + chunk.num_scored)
        self.native.n_tokens = end
        return rows

    def fill_run(self, tokens: Sequence[int], start: int, num_outputs: int) -> None:
        """Write a run of tokens of sequence 0 from position `start`, logits after the last ones."""
        end = len(tokens)
        self._token[:end] = tokens
        self._pos[:end] = self._positions[:end]
        self._pos[:end] += start
        self._seq[:end] = 0
        self._output[:end] = 0
        self._output[end - num_outputs : end] = 1
        self.native.n_tokens = end


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
