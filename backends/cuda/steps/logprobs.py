"""Logprobs of sampled tokens and of prompts, computed only for the requests that want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.model.host_copy import to_device
from localgen.backends.runner.interface import Chunk
from localgen.backends.types import PositionLogprobs, TokenLogprob


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of a token and of the n most likely tokens of each row, best first.

    logits: float [rows, vocab], before any sampler. tokens: int64 [rows]. num_top: n,
    capped at the vocabulary size. Returns logprobs [rows], token ids int64 [rows, n] and their
    logprobs [rows, n]; float32, or float64 if logits are. Does not synchronize with the device.
    """
    exact = upcast(logits)
    total = exact.logsumexp(-1, keepdim=True)
    best = exact.topk(min(num_top, exact.shape[-1]))
    of_chosen = exact.gather(-1, tokens[:, None]) - total
    return of_chosen[:, 0], best.indices, best.values - total


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Logprobs of a step, from the model's logits before any sampler.

    top_counts: row of `values` and number of top tokens wanted, by row of the step. values: float64
    [rows in top_counts, 1 + 2 n], the token's logprob, the n top token ids and their logprobs; n is
    the largest count.
    """

    top_counts: dict[int, tuple[int, int]]
    values: Tensor

    def transferred(self, copy: Callable[[Tensor], Tensor]) -> StepLogprobs:
        """Return these logprobs with `values` replaced by `copy(values)`."""
        return replace(self, values=copy(self.values))

    def for_row(
        self, row: int, token: int, token_text: Callable[[int], str]
    ) -> PositionLogprobs | None:
        """Return the logprobs of a row, or None if its request wants none.

        token: the token sampled or scored in the row. `values` must be on the host.
        """
        if row not in self.top_counts:
            return None

        def entry(token: float, logprob: float) -> TokenLogprob:
            return TokenLogprob(int(token), token_text(int(token)), logprob)

        at, count = self.top_counts[row]
        chosen, *rest = self.values[at].tolist()
        n = len(rest) // 2
        best = list(zip(rest[:n], rest[n:], strict=True))
        return PositionLogprobs(entry(token, chosen), tuple(entry(*each) for each in best[:count]))


def step_logprobs(
    chunks: Sequence[Chunk], logits: Tensor, tokens: Tensor, first_row: int
) -> StepLogprobs | None:
    """Compute the logprobs that these chunks' requests want, or None if they want none.

    Does not synchronize with the device. logits: float32 [outputs, vocab]. tokens: int64 [outputs],
    sampled in each row, also in those that are scored. first_row: row of the step that the first of
    them belongs to.
    """
    counts: dict[int, int] = {}
    scored: dict[int, int] = {}  # token of each scored row
    row = 0
    for chunk in chunks:
        after = row + chunk.num_outputs
        if chunk.num_scored:
            scored |= zip(range(row, after), chunk.scored_tokens, strict=False)
        if chunk.seq.params.logprobs is not None:
            counts |= dict.fromkeys(range(row, after), chunk.seq.params.logprobs)
        row = after
    if not counts:
        return None
    if scored:
        rows, known = to_device(
            [np.array(list(each), np.int32) for each in (scored, scored.values())], logits.device
        )
        tokens = tokens.index_copy(0, rows.long(), known.long())
    if len(counts) < len(logits):
        (rows,) = to_device([np.array(list(counts), np.int32)], logits.device)
        logits, tokens = logits.index_select(0, rows), tokens.index_select(0, rows)
    own, best, values = top_logprobs(logits, tokens, max(counts.values()))
    # float64 represents every token id exactly: one tensor, one copy to the host
    numbers = torch.cat([own[:, None].double(), best.double(), values.double()], -1)
    places = enumerate(counts.items())
    return StepLogprobs({first_row + row: (at, count) for at, (row, count) in places}, numbers)
