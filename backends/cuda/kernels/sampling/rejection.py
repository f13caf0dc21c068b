"""Rejection sampling of sampled draft tokens; the output has exactly the target's distribution.

A draft token d sampled from q is accepted with probability min(1, p(d) / q(d)). Otherwise a token
is sampled from the residual max(0, p - q), which never yields d (Leviathan et al. 2023; Chen et al.
2023). p is the target's distribution after all sampling parameters. The noise that sampled the
draft must be independent of the row's noise.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import can_use_triton, upcast
from localgen.backends.cuda.kernels.launch import Variant, launch
from localgen.backends.cuda.kernels.sampling.gumbel import (
    gumbel_noise,
    tl_gumbel_noise,
    tl_uniform_noise,
    uniform_noise,
)
from localgen.backends.cuda.kernels.sampling.kernels import FLOAT32_MIN, NO_TOKEN
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput, SamplingTensors

_BLOCK = 4096
_WARPS = 8
# views of packed buffers: their alignment varies and must not trigger a recompilation
_UNALIGNED_ARGS = ["rows", "draft_tokens", "temperatures", "seed_hashes", "positions"]


@dataclass(frozen=True, slots=True, eq=False)
class SampledDrafts:
    """Draft tokens and the probabilities they were sampled from.

    rows: int32 [drafts], the row that verifies each draft, without duplicates. tokens: int32
    [drafts]. draft_probs: float32 [drafts, draft vocab]; tokens beyond the draft model's vocabulary
    have probability 0.
    """

    rows: Tensor
    tokens: Tensor
    draft_probs: Tensor


def sampling_probs(sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor) -> Tensor:
    """Return the probabilities that the rows' tokens were sampled from, float [len(rows), vocab].

    rows: int32, not greedy. A row in which every token is banned is all 0.
    """
    by = sampling_probs_triton if can_use_triton(sampled.logits) else sampling_probs_reference
    return by(sampled, settings, rows)


def rejection_sample(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """Return the tokens of all rows, int64 [rows], with drafts accepted or replaced.

    sampled.tokens may be overwritten. Rows with a draft are not greedy.
    """
    return (
        rejection_sample_triton if can_use_triton(sampled.logits) else rejection_sample_reference
    )(sampled, settings, drafts)


def sampling_probs_reference(
    sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor
) -> Tensor:
    """PyTorch reference of `sampling_probs`."""
    at = rows.long()
    x = upcast(sampled.logits)[at]
    kept = x.masked_fill(x < sampled.min_logits[at, None], -torch.inf)
    kept = (kept - kept.amax(-1, keepdim=True)) / settings.temperature[at, None]
    return kept.softmax(-1).nan_to_num(0.0)


def rejection_sample_reference(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """PyTorch reference of `rejection_sample`."""
    at, tokens = drafts.rows.long(), drafts.tokens.long()
    p = sampling_probs_reference(sampled, settings, drafts.rows)
    q = torch.nn.functional.pad(
        drafts.draft_probs, (0, p.shape[-1] - drafts.draft_probs.shape[-1])
    ).to(p.dtype)
    mixes, positions = settings.seed_hash[at], settings.position[at]
    of_draft = tokens[:, None]
    kept = _is_accepted(
        p.gather(-1, of_draft)[:, 0], q.gather(-1, of_draft)[:, 0], uniform_noise(mixes, positions)
    )
    left = _residual_probs(p, q)
    scores, best = (left.log() + gumbel_noise(mixes, positions, p.shape[-1])).max(-1)
    # if p and q differ only by rounding, the residual may be empty: keep the draft
    kept |= scores == -torch.inf
    found = sampled.tokens.clone()
    some = p.sum(-1) > 0
    found[at] = torch.where(some, torch.where(kept, tokens, best), found[at])
    return found


def _is_accepted(target_probs: Tensor, draft_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return a mask of accepted drafts."""
    return uniform * draft_probs < target_probs


def _residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the unnormalized distribution of the replacement token."""
    return (target_probs - draft_probs).clamp(min=0)


def sampling_probs_triton(
    sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor
) -> Tensor:
    """Triton implementation of `sampling_probs`, one launch."""
    vocab = sampled.logits.shape[1]
    found = torch.empty((len(rows), vocab), dtype=torch.float32, device=sampled.logits.device)
    launch(_sampling_probs_kernel, (len(rows),))(
        *(sampled.logits, sampled.logits.stride(0), vocab, sampled.min_logits, rows),
        *(settings.temperature, found),
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return found


def rejection_sample_triton(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """Triton implementation of `rejection_sample`, one launch; overwrites sampled.tokens."""
    assert drafts.draft_probs.stride(1) == 1
    launch(_rejection_sample_kernel, (len(drafts.rows),))(
        *(
            sampled.logits,
            sampled.logits.stride(0),
            sampled.logits.shape[1],
            sampled.min_logits,
            drafts.rows,
        ),
        *(settings.temperature, settings.seed_hash, settings.position),
        *(
            drafts.tokens,
            drafts.draft_probs,
            drafts.draft_probs.stride(0),
            drafts.draft_probs.shape[1],
            sampled.tokens,
        ),
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return sampled.tokens


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED_ARGS)
def _sampling_probs_kernel(
    logits, stride, vocab, min_logits, rows, temperatures, probs, block: tl.constexpr
):
    """Write the probabilities of one row, float32, to row program_id of probs."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    line, cut = logits + row * stride, tl.load(min_logits + row)
    temperature = tl.load(temperatures + row)
    peak, total = _max_and_exp_sum(line, vocab, cut, temperature, block)
    target = probs + tl.program_id(0).to(tl.int64) * vocab
    for start in range(0, vocab, block):
        tokens = start + tl.arange(0, block)
        p = _probs(line, tokens, vocab, cut, temperature, peak, total)
        tl.store(target + tokens, p, mask=tokens < vocab)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED_ARGS)
def _rejection_sample_kernel(
    logits,
    stride,
    vocab,
    min_logits,
    rows,
    temperatures,
    seed_hashes,
    positions,
    draft_tokens,
    draft_probs,
    draft_probs_stride,
    draft_vocab,
    sampled_tokens,
    block: tl.constexpr,
):
    """Write the accepted draft or its replacement, int64, to sampled_tokens[row]."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    draft = tl.load(draft_tokens + tl.program_id(0))
    line, cut = logits + row * stride, tl.load(min_logits + row)
    of_draft = draft_probs + tl.program_id(0).to(tl.int64) * draft_probs_stride
    temperature = tl.load(temperatures + row)
    mix, position = tl.load(seed_hashes + row), tl.load(positions + row)
    peak, total = _max_and_exp_sum(line, vocab, cut, temperature, block)
    if peak >= FLOAT32_MIN:
        own = tl.max(_probs(line, draft + tl.arange(0, 1), vocab, cut, temperature, peak, total))
        theirs = tl.load(of_draft + draft, mask=draft < draft_vocab, other=0.0)
        token = draft
        if tl_uniform_noise(mix, position) * theirs >= own:
            score = tl.full((), -float("inf"), tl.float32)
            for start in range(0, vocab, block):
                tokens = start + tl.arange(0, block)
                p = _probs(line, tokens, vocab, cut, temperature, peak, total)
                left = p - tl.load(of_draft + tokens, mask=tokens < draft_vocab, other=0.0)
                noise = tl_gumbel_noise(mix, position, tokens)
                scores = tl.where(left > 0, tl.log(left) + noise, -float("inf"))
                here = tl.max(scores)
                first = tl.min(tl.where(scores == here, tokens, NO_TOKEN))
                # an empty residual is due to rounding: keep the draft
                token = tl.where(here > score, first, token)
                score = tl.maximum(here, score)
        tl.store(sampled_tokens + row, token.to(tl.int64))


@triton.jit
def _load_kept_logits(row_logits, tokens, vocab, min_logit):
    """Load logits as float32; those below min_logit become -inf."""
    values = tl.load(row_logits + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(values >= min_logit, values, -float("inf"))


@triton.jit
def _max_and_exp_sum(row_logits, vocab, min_logit, temperature, block: tl.constexpr):
    """Return a row's largest logit and the sum of exp((logit - largest) / temperature)."""
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, block):
        values = _load_kept_logits(row_logits, start + tl.arange(0, block), vocab, min_logit)
        higher = tl.maximum(peak, tl.max(values))
        base = tl.where(higher < FLOAT32_MIN, 0.0, higher)
        total *= tl.exp((peak - base) / temperature)
        total += tl.sum(tl.exp((values - base) / temperature))
        peak = higher
    return peak, total


@triton.jit
def _probs(row_logits, tokens, vocab, min_logit, temperature, max_logit, exp_sum):
    """Return the probabilities of these tokens."""
    values = _load_kept_logits(row_logits, tokens, vocab, min_logit)
    base = tl.where(max_logit < FLOAT32_MIN, 0.0, max_logit)
    return tl.exp((values - base) / temperature) / tl.where(exp_sum > 0, exp_sum, 1.0)


def variants() -> Iterator[Variant]:
    """Both kernels, for float32 logits."""
    first = {
        "logits": "*fp32",
        "stride": "i32",
        "vocab": "i32",
        "min_logits": "*fp32",
        "rows": "*i32",
        "temperatures": "*fp32",
    }
    drafts = {
        "seed_hashes": "*i64",
        "positions": "*i64",
        "draft_tokens": "*i32",
        "draft_probs": "*fp32",
        "draft_probs_stride": "i32",
        "draft_vocab": "i32",
        "sampled_tokens": "*i64",
    }
    for kernel, more in (
        (_sampling_probs_kernel, {"probs": "*fp32"}),
        (_rejection_sample_kernel, drafts),
    ):
        yield Variant(
            name=kernel.fn.__name__.strip("_"),
            kernel=kernel,
            signature={**first, **more, "block": "constexpr"},
            constants={"block": _BLOCK},
            num_warps=_WARPS,
        )
