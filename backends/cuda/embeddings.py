"""Vectors of texts: states after the last norm, pooled over pages that are lent for as long."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import StepInputs, arrange
from localgen.backends.engine.embeddings import as_sequences, in_slices, is_last
from localgen.backends.formats.hf.tokenizer import optional_json
from localgen.backends.runner.interface import Chunk, EmbedSlice, NoRoom, StepFailed
from localgen.backends.runner.sequence import Sequence

# how a folder of sentence-transformers names what we call so
_POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}


class States(Protocol):
    """What is needed of runner.Steps."""

    def states(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the outputs after the last norm, [outputs, hidden]."""
        ...

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the cache, (source, target) each."""
        ...


@dataclass(frozen=True, slots=True)
class Pooler:
    """How the states of a text become one vector. kind: mean, last or cls."""

    kind: str = "mean"

    @classmethod
    def of_folder(cls, folder: Path) -> Pooler:
        """As sentence-transformers has it written down there; the mean where it has not, or where
        the model is a single file."""
        if not folder.is_dir():
            return cls()
        settings = optional_json(folder / "1_Pooling" / "config.json")
        named = [kind for name, kind in _POOLINGS.items() if settings.get(name)]
        return cls(named[0] if named else "mean")

    def part(self, chunk: Chunk, states: Tensor) -> Tensor:
        """What a slice adds to the vector of its text, float32 [hidden].

        states: [tokens, hidden].
        """
        length = len(chunk.seq.tokens)
        if self.kind == "mean":
            return states.float().sum(0) / length
        ends = chunk.start + len(chunk) == length
        counted = states[-1:] if self.kind == "last" else states[:1]
        here = ends if self.kind == "last" else chunk.start == 0
        return counted.float().sum(0) * here


def embed(
    steps: States,
    room: PagedCache,
    pooler: Pooler,
    inputs: list[list[int]],
    most: Callable[[], int],
) -> Generator[EmbedSlice, None, None]:
    """As Embedder.embed."""
    seqs = as_sequences(inputs)
    lent: list[Sequence] = []
    try:
        for seq in seqs:
            room.lend(seq)
            lent.append(seq)
        steps.copy(room.take_copies())  # none may come later into a page that is lent
        sums: dict[Sequence, Tensor] = {}
        for chunks in in_slices(seqs, most):
            states, row = _computed(steps, room, chunks), 0
            for chunk in chunks:
                part = pooler.part(chunk, states[row : row + len(chunk)])
                sums[chunk.seq] = sums[chunk.seq] + part if chunk.seq in sums else part
                row += len(chunk)
            vectors = None
            if is_last(chunks, seqs):
                vectors = torch.stack([sums[seq] for seq in seqs]).cpu().numpy()
            elif states.is_cuda:
                torch.cuda.synchronize(states.device)  # or the next slice would be planned too soon
            yield EmbedSlice(row, vectors)
    finally:
        for seq in lent:
            room.release(seq, keep=False)


def _computed(steps: States, room: PagedCache, chunks: list[Chunk]) -> Tensor:
    """NoRoom: the device has no memory beside the pool; StepFailed."""
    try:
        return steps.states(arrange(chunks, room.table))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise NoRoom from None
    except RuntimeError as error:
        raise StepFailed(f"the GPU could not compute a text: {error}") from error
