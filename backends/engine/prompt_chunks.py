"""The prompts of a step: their shares of the token budget, and prefixes that are being computed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from localgen.backends.engine.background import is_background
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence, common_prefix_len

# minimum length of a prefix in flight worth waiting for
MIN_SHARED_TOKENS = 32


def prompt_chunks(prefilling: Seq[Sequence], budget: int, outputs_left: int) -> list[Chunk]:
    """Distribute the prefill budget. prefilling: sequences that compute prompts, oldest first.

    The oldest prompt gets all it needs if that fits in the budget, else half of the budget; the
    rest goes to the prompts with the fewest uncomputed tokens. So a long prompt advances in
    every step without blocking short ones.
    """
    if not prefilling:
        return []
    oldest, others = prefilling[0], sorted(prefilling[1:], key=lambda s: s.num_uncomputed)
    shares: dict[str, int] = {}
    left = budget
    fits = not others or oldest.num_uncomputed <= budget
    reserved = min(oldest.num_uncomputed, budget if fits else (budget + 1) // 2)
    left -= reserved
    for seq in others:
        shares[seq.id] = min(seq.num_uncomputed, left)
        left -= shares[seq.id]
    shares[oldest.id] = min(oldest.num_uncomputed, reserved + left)
    chunks = []
    for seq in (oldest, *others):
        samples = shares[seq.id] == seq.num_uncomputed
        if shares[seq.id] and (outputs_left or not samples):
            chunk = Chunk.of_uncomputed(seq, shares[seq.id])
            if chunk.num_outputs > outputs_left:  # of a prompt that is scored: cut it
                chunk = Chunk.of_uncomputed(seq, len(chunk) - chunk.num_outputs + outputs_left)
            if len(chunk):
                chunks.append(chunk)
                outputs_left -= chunk.num_outputs
    return chunks


def is_prefix_in_flight(seq: Sequence, prefilling: Iterable[Sequence]) -> bool:
    """True if one of these sequences is computing a prefix that `seq` can share.

    One in the background is not waited for by others: while they run, it may not compute.
    """
    usable = seq.reusable_tokens
    return any(
        common_prefix_len(other.tokens, usable) - other.num_computed >= MIN_SHARED_TOKENS
        for other in prefilling
        if is_background(other) <= is_background(seq)
        and other.num_uncomputed > MIN_SHARED_TOKENS
        and other.cache_salt == seq.cache_salt
    )
