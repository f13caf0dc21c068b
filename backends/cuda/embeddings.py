"""Embeddings: final hidden states of texts, pooled; uses temporary pages of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import StepInputs, build_step_inputs
from localgen.backends.engine.embeddings import (
    is_last_slice,
    split_into_slices,
    unscheduled_sequences,
)
from localgen.backends.formats.hf.folder import read_optional_json
from localgen.backends.runner.interface import Chunk, EmbedSlice, NoRoom, StepFailed
from localgen.backends.runner.sequence import Sequence

# pooling modes in the config of sentence-transformers
_POOLING_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}


class HiddenStatesExecutor(Protocol):
    """The part of runner.StepExecutor that embeddings need."""

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the output rows after the final norm, [outputs, hidden]."""
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the KV cache, given as (source, target)."""
        ...


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pools the hidden states of a text into one vector. pooling: mean, last or cls."""

    pooling: str = "mean"

    @classmethod
    def from_folder(cls, folder: Path) -> Pooler:
        """Read the sentence-transformers pooling config of a model folder.

        Defaults to mean, also if the model is a single file.
        """
        if not folder.is_dir():
            return cls()
        settings = read_optional_json(folder / "1_Pooling" / "config.json")
        named = [kind for name, kind in _POOLING_MODES.items() if settings.get(name)]
        return cls(named[0] if named else "mean")

    def pool_slice(self, chunk: Chunk, states: Tensor) -> Tensor:
        """Contribution of a slice to the vector of its text, float32 [hidden].

        states: [tokens, hidden].
        """
        length = len(chunk.seq.tokens)
        if self.pooling == "mean":
            return states.float().sum(0) / length
        ends = chunk.start + len(chunk) == length
        counted = states[-1:] if self.pooling == "last" else states[:1]
        here = ends if self.pooling == "last" else chunk.start == 0
        return counted.float().sum(0) * here


def embed_sequences(
    executor: HiddenStatesExecutor,
    kv_cache: PagedCache,
    pooler: Pooler,
    inputs: list[list[int]],
    max_tokens: Callable[[], int],
) -> Generator[EmbedSlice, None, None]:
    """See Embedder.embed."""
    seqs = unscheduled_sequences(inputs)
    lent: list[Sequence] = []
    try:
        for seq in seqs:
            kv_cache.admit_uncached(seq)
            lent.append(seq)
        # pending copies must not overwrite the allocated pages later
        kv_cache.copy_pending(executor.copy_pages)
        sums: dict[Sequence, Tensor] = {}
        for chunks in split_into_slices(seqs, max_tokens):
            states, row = _compute_states(executor, kv_cache, chunks), 0
            for chunk in chunks:
                part = pooler.pool_slice(chunk, states[row : row + len(chunk)])
                sums[chunk.seq] = sums[chunk.seq] + part if chunk.seq in sums else part
                row += len(chunk)
            vectors = None
            if is_last_slice(chunks, seqs):
                vectors = torch.stack([sums[seq] for seq in seqs]).cpu().numpy()
            elif states.is_cuda:
                torch.cuda.synchronize(states.device)  # the slice is timed to size the next one
            yield EmbedSlice(row, vectors)
    finally:
        for seq in lent:
            kv_cache.release(seq, keep=False)


def _compute_states(
    executor: HiddenStatesExecutor, kv_cache: PagedCache, chunks: list[Chunk]
) -> Tensor:
    """Raises NoRoom if the device is out of memory, StepFailed on other CUDA errors."""
    try:
        return executor.hidden_states(build_step_inputs(chunks, kv_cache.page_table))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise NoRoom from None
    except RuntimeError as error:
        raise StepFailed(f"the GPU failed to compute an embedding: {error}") from error
