"""A step in which every sequence computes one token, as most steps do."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import overload

from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence


class DecodeStep(Seq[Chunk]):
    """The chunks of a step of decoding sequences without drafts: the last token of each.

    Chunks are made only for runners that read them; the others use the arrays of the step.
    seqs: the same tuple as in the step before, while no sequence joins or ends. starts, tokens:
    position and token of each chunk.
    """

    __slots__ = ("_chunks", "seqs", "starts", "tokens")

    def __init__(self, seqs: tuple[Sequence, ...]) -> None:
        """The next step of these sequences, which are all decoding."""
        self.seqs = seqs
        self.starts = [seq.num_computed for seq in seqs]
        self.tokens = [seq.tokens[-1] for seq in seqs]
        self._chunks: list[Chunk] = []

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks; the same objects at each call."""
        if not self._chunks:
            self._chunks = [
                Chunk(seq=seq, start=start, tokens=[token], is_sampled=True)
                for seq, start, token in zip(self.seqs, self.starts, self.tokens, strict=True)
            ]
        return self._chunks

    def __len__(self) -> int:
        return len(self.seqs)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        return self.chunks[index]
