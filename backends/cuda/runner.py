"""ModelRunner over the decoder and its paged cache."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.embeddings import Pooler, embed
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import StepInputs, arrange
from localgen.backends.cuda.steps.cuda_graphs import Latest
from localgen.backends.cuda.steps.logprobs import StepLogprobs, step_logprobs
from localgen.backends.cuda.steps.run_ahead import Lookahead, can_go_on, looks_back, next_inputs
from localgen.backends.cuda.steps.sampler import UNSUPPORTED, Row, choose_and_show
from localgen.backends.engine.speculation.speculation import MOST_DRAFTS
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    Sampled,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence


class Steps(Protocol):
    """Computes steps: on one device, or on several that split each layer."""

    device: torch.device

    def run(self, inputs: StepInputs, latest: Latest | None = None) -> Tensor:
        """Logits of the outputs, float32 [outputs, vocab], valid until the next step."""
        ...

    def states(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the outputs after the last norm, [outputs, hidden]."""
        ...

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the cache, (source, target) each."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A step in flight. tokens: of all sampled rows, on the host once `done` says so.

    rows: where those of each chunk begin. logprobs: what was asked of them, on the host as the
    tokens are. shown: what tokens were drawn from, by their row. error: why there is no step.
    """

    chunks: Seq[Chunk]
    tokens: Tensor
    rows: list[int] = field(default_factory=list)
    logprobs: StepLogprobs | None = None
    shown: dict[int, Tensor] = field(default_factory=dict)
    done: torch.cuda.Event | None = None
    error: Exception | None = None


class CudaRunner:
    """Owns the weights and the cache of one model. See ModelRunner for the calls.

    text: what a token says, for logprobs. ahead: whether to launch steps before they are asked for.
    pooler: how texts become vectors.
    """

    def __init__(
        self,
        steps: Steps,
        room: PagedCache,
        limits: Limits,
        text: Callable[[int], str],
        *,
        ahead: bool,
        pooler: Pooler,
    ) -> None:
        self._pooler = pooler
        self._steps, self._text = steps, text
        self._ahead: Lookahead | None = None
        self.room = room
        self.limits = replace(limits, looks_ahead=ahead)

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit."""
        self._forget(seq)
        return self.room.admit(seq, spare=spare)

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow."""
        return self.room.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self._forget(seq)
        self.room.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        self._forget(seq)
        self.room.release(seq, keep=keep)

    def _forget(self, seq: Sequence) -> None:
        if self._ahead is not None:
            self._ahead.forget(seq)

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage."""
        return self.room.usage()

    def launch(self, chunks: Seq[Chunk]) -> Ticket:
        """As ModelRunner.launch; on a GPU this returns before the work is done."""
        try:
            return self._launch(chunks)
        except torch.OutOfMemoryError:
            # what this step needed beside the pool is not there: one sequence has to give way
            self._ahead = None
            torch.cuda.empty_cache()
            return Ticket(chunks, torch.empty(0, dtype=torch.int64), error=NoRoom())

    def _launch(self, chunks: Seq[Chunk]) -> Ticket:
        ahead, self._ahead = self._ahead, None
        covered = [c for c in chunks if ahead is not None and ahead.covers(c)]
        known = set(map(id, covered))
        rest = [chunk for chunk in chunks if id(chunk) not in known]
        parts = [] if ahead is None else [ahead.tokens]
        rows = {} if ahead is None else {id(c): ahead.rows[c.seq] for c in covered}
        said = None
        shown = {} if ahead is None else dict(ahead.shown)
        if rest:
            at = first = sum(map(len, parts))
            self._steps.copy(self.room.take_copies())
            logits = self._steps.run(arrange(rest, self.room.table))
            for chunk in rest:
                rows[id(chunk)] = at
                at += 1 + chunk.num_drafts if chunk.samples else 0
            chosen, new = self._choose(rest, logits)
            parts.append(chosen)
            shown |= {first + row: q for row, q in new.items()}
            said = step_logprobs(rest, logits, parts[-1], first)
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = [rows[id(chunk)] for chunk in chunks]
        ticket = self._ticket(Ticket(chunks, tokens, order, said, shown))
        if self.limits.looks_ahead:
            self._launch_ahead(chunks, tokens, order)
        return ticket

    def _choose(self, chunks: Seq[Chunk], logits: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        rows: list[Row] = []
        shown = []
        for chunk in chunks:
            rows += _rows(chunk) if chunk.samples else []
            if chunk.shows:
                shown.append(len(rows) - 1)
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=self._steps.device), {}
        return choose_and_show(_held(chunks, logits), rows, shown)

    def _ticket(self, ticket: Ticket) -> Ticket:
        """With what is read on the way to the host."""
        tokens, said = ticket.tokens, ticket.logprobs
        if tokens.device.type == "cpu":
            return ticket
        host, said = _to_host(tokens), said and said.moved(_to_host)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(tokens.device))
        return replace(ticket, tokens=host, logprobs=said, done=done)

    def _launch_ahead(self, chunks: Seq[Chunk], tokens: Tensor, rows: list[int]) -> None:
        """Start the step after this one, if all it takes is known."""
        going = [
            (chunk, row)
            for chunk, row in zip(chunks, rows, strict=True)
            if chunk.start + 2 <= chunk.seq.limit  # or this is its last token
        ]
        if not going or not all(
            can_go_on(chunk) and self.room.grow(chunk.seq, 2) for chunk, _ in going
        ):
            return
        next_chunks = [chunk for chunk, _ in going]
        self._steps.copy(self.room.take_copies())
        inputs = next_inputs(next_chunks, [self.room.table(chunk.seq) for chunk in next_chunks])
        sources = torch.tensor([row for _, row in going])
        logits = self._steps.run(inputs, Latest(tokens, sources.to(tokens.device)))
        # with the token that only the device knows there is one more before it; none looks at it
        chosen = [Row(c.seq.params, range(c.start + 2), c.seq.barred(1)) for c in next_chunks]
        starts = {chunk.seq: chunk.start + 1 for chunk in next_chunks}
        shown = [row for row, chunk in enumerate(next_chunks) if chunk.shows]
        new, drawn_from = choose_and_show(logits, chosen, shown)
        self._ahead = Lookahead(new, starts, drawn_from)

    def collect(self, ticket: Ticket) -> StepResult:
        """As ModelRunner.collect."""
        if ticket.error is not None:
            raise ticket.error
        try:
            if ticket.done is not None:
                ticket.done.synchronize()
        except RuntimeError as error:
            raise _failed(error) from error
        tokens = ticket.tokens.tolist()
        return [
            self._accepted(chunk, tokens[row:], ticket, row)
            for chunk, row in zip(ticket.chunks, ticket.rows, strict=True)
        ]

    def settle(self) -> None:
        """As LooksAhead.settle."""
        device = self._steps.device
        if self._ahead is None or device.type == "cpu":
            return
        try:
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise _failed(error) from error

    def _accepted(self, chunk: Chunk, tokens: list[int], ticket: Ticket, row: int) -> Sampled:
        """The drafts that are what was sampled there, and the token after those."""
        if not chunk.samples:
            return Sampled()
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        right = next(
            (i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), len(drafts)
        )
        taken = tuple(tokens[: right + 1])
        if chunk.seq.matcher is not None:
            for count, token in enumerate(taken, 1):
                chunk.seq.matcher.accept(token)
                if chunk.seq.matcher.is_done:
                    taken = taken[:count]
                    break
        said, drawn_from = ticket.logprobs, ticket.shown.get(row)
        if said is None:
            return Sampled(taken, (), drawn_from)
        found = (said.of(row + i, token, self._text) for i, token in enumerate(taken))
        return Sampled(taken, tuple(each for each in found if each is not None), drawn_from)

    def embed(
        self, inputs: list[list[int]], most: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        """As Embedder.embed."""
        return embed(self._steps, self.room, self._pooler, inputs, most)

    def close(self) -> None:
        """As ModelRunner.close."""
        self._ahead = None
        self._steps.close()


def _failed(error: RuntimeError) -> StepFailed:
    return StepFailed(f"the GPU could not compute a step: {error}")


def _to_host(there: Tensor) -> Tensor:
    """A copy in pinned memory, whole once the stream has come so far."""
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    return host.copy_(there, non_blocking=True)


def _rows(chunk: Chunk) -> list[Row]:
    """The positions of a chunk that are sampled, each with all that comes before it."""
    seq, end = chunk.seq, chunk.start + len(chunk)
    lengths = range(end - chunk.num_drafts, end + 1)
    known: Seq[int] = range(end)  # only their number counts
    if looks_back(seq.params):
        known = seq.tokens[: chunk.start] + chunk.tokens
    rows = [
        # a grammar sees to that itself: it may leave nothing but the end
        Row(seq.params, known[:length], frozenset() if seq.matcher else seq.barred(ahead))
        for ahead, length in enumerate(lengths)
    ]
    for at, q in enumerate(chunk.drawn_from):
        rows[at] = replace(rows[at], draft=chunk.tokens[at - chunk.num_drafts], q=q)
    return rows


def _held(chunks: Seq[Chunk], logits: Tensor) -> Tensor:
    """The logits with what grammars do not allow at -inf."""
    held, row = logits, 0
    for chunk in chunks:
        count = 1 + chunk.num_drafts if chunk.samples else 0
        if count and chunk.seq.matcher is not None:
            held = logits.clone() if held is logits else held
            drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
            allowed = chunk.seq.matcher.ahead(drafts, chunk.seq.barred)
            banned = torch.from_numpy(~np.stack(allowed))
            held[row : row + count].masked_fill_(banned.to(held.device), -torch.inf)
        row += count
    return held


def limits(
    *, max_seqs: int, max_batch_tokens: int, max_len: int, kv_tokens: int, share: bool
) -> Limits:
    """What this runner can do at such sizes."""
    return Limits(
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        max_outputs=max_seqs + max(max_seqs, MOST_DRAFTS),
        max_len=max_len,
        kv_tokens=kv_tokens,
        can_rewind=share,
        unsupported=UNSUPPORTED,
        stochastic=True,
    )
