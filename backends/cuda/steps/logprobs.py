"""Log probabilities that the requests of a step ask for, and nothing else of its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.runner.interface import Chunk
from localgen.backends.types import PositionLogprobs, TokenLogprob


def top_logprobs(
    logits: Tensor, sampled_tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Under the model itself: of each row's chosen token, and of its n best ones, best first.

    logits: float [rows, vocab]. sampled_tokens: int64 [rows]. num_top: if beyond the vocabulary,
    all of it. Gives log probabilities [rows], tokens int64 [rows, n] and their log probabilities
    [rows, n], float32, or float64 for logits in float64. In torch: none of it waits for the device.
    """
    exact = upcast(logits)
    total = exact.logsumexp(-1, keepdim=True)
    best = exact.topk(min(num_top, exact.shape[-1]))
    of_chosen = exact.gather(-1, sampled_tokens[:, None]) - total
    return of_chosen[:, 0], best.indices, best.values - total


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Under the model itself, before any sampler.

    top_counts: how many best tokens are wanted, by the row of the step. values: float64, a line for
    each of these rows: the chosen token's log probability, the n best tokens, and theirs. n: the
    largest count.
    """

    top_counts: dict[int, int]
    values: Tensor

    def transferred(self, copy: Callable[[Tensor], Tensor]) -> StepLogprobs:
        """The same with the numbers elsewhere."""
        return replace(self, values=copy(self.values))

    def for_row(
        self, row: int, token: int, token_text: Callable[[int], str]
    ) -> PositionLogprobs | None:
        """Those of a row and the token chosen there, if they are wanted. numbers: on the host."""
        if row not in self.top_counts:
            return None

        def entry(token: float, logprob: float) -> TokenLogprob:
            return TokenLogprob(int(token), token_text(int(token)), logprob)

        chosen, *rest = self.values[list(self.top_counts).index(row)].tolist()
        n = len(rest) // 2
        best = list(zip(rest[:n], rest[n:], strict=True))
        return PositionLogprobs(
            entry(token, chosen), tuple(entry(*each) for each in best[: self.top_counts[row]])
        )


def step_logprobs(
    chunks: Sequence[Chunk], logits: Tensor, tokens: Tensor, first_row: int
) -> StepLogprobs | None:
    """What the requests of these chunks want, without waiting for the device; None: nothing.

    logits: float32 [sampled, vocab]. tokens: int64 [sampled]. first_row: the step's row of the
    first.
    """
    counts: dict[int, int] = {}
    row = 0
    for chunk in chunks:
        after = row + (1 + chunk.num_drafts if chunk.is_sampled else 0)
        if chunk.seq.params.logprobs is not None:
            counts |= dict.fromkeys(range(row, after), chunk.seq.params.logprobs)
        row = after
    if not counts:
        return None
    if len(counts) < len(logits):
        rows = torch.tensor(list(counts)).to(logits.device, non_blocking=True)
        logits, tokens = logits[rows], tokens[rows]
    own, best, values = top_logprobs(logits, tokens, max(counts.values()))
    # a double holds every token exactly: one copy for all three
    numbers = torch.cat([own[:, None].double(), best.double(), values.double()], -1)
    return StepLogprobs({first_row + row: count for row, count in counts.items()}, numbers)
