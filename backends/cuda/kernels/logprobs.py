"""Log probabilities of a few tokens, so that only these go to the host."""

from __future__ import annotations

from torch import Tensor

from localgen.backends.cuda.kernels.wide import wide


def top_logprobs(logits: Tensor, chosen: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Under the model itself: of each row's chosen token, and of its n best ones, best first.

    logits: float [rows, vocab]. chosen: int64 [rows]. n: if beyond the vocabulary, all of it.
    Gives log probabilities [rows], tokens int64 [rows, n] and their log probabilities [rows, n],
    float32, or float64 for logits in float64. In torch: none of it waits for the device.
    """
    exact = wide(logits)
    total = exact.logsumexp(-1, keepdim=True)
    best = exact.topk(min(n, exact.shape[-1]))
    of_chosen = exact.gather(-1, chosen[:, None]) - total
    return of_chosen[:, 0], best.indices, best.values - total
