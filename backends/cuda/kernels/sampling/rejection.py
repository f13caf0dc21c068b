"""Drafts that were drawn, not chosen: kept or replaced so that the target's distribution remains.

A draft d that was drawn from q is kept with probability min(1, p(d) / q(d)). If it is not, a token
is drawn from max(0, p - q), which is never d (Leviathan et al. 2023; Chen et al. 2023). p is what
sampling draws from, all settings included. The draw of the draft must not have shared noise with
that of the row.
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
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput, SamplingTensors

_BLOCK = 4096
_WARPS = 8
_FLOAT32_MIN = tl.constexpr(-3.4028234663852886e38)
_NO_TOKEN = tl.constexpr(2**31 - 1)
# columns of packed copies: where they begin must not decide what is compiled
_UNALIGNED_ARGS = ["rows", "draft_tokens", "temperatures", "seed_hashes", "positions"]


@dataclass(frozen=True, slots=True, eq=False)
class SampledDrafts:
    """Drafts and what they were drawn from.

    rows: int32 [drafts], the rows that verify them, each once. tokens: int32 [drafts]. draft_probs:
    float32 [drafts, any vocabulary], probabilities; beyond its own a vocabulary has none.
    """

    rows: Tensor
    tokens: Tensor
    draft_probs: Tensor


def sampling_probs(sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor) -> Tensor:
    """What the tokens of these rows were drawn from, float [len(rows), vocab].

    rows: int32, none of them greedy. Where no token can be drawn, all are 0.
    """
    by = sampling_probs_triton if can_use_triton(sampled.logits) else sampling_probs_reference
    return by(sampled, settings, rows)


def rejection_sample(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """Tokens of all rows, int64 [rows]: in the rows of drafts, the draft or what replaces it.

    sampled.tokens may be overwritten. Rows of drafts are not greedy.
    """
    return (
        rejection_sample_triton if can_use_triton(sampled.logits) else rejection_sample_reference
    )(sampled, settings, drafts)


def sampling_probs_reference(
    sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor
) -> Tensor:
    """The same in plain torch."""
    at = rows.long()
    x = upcast(sampled.logits)[at]
    kept = x.masked_fill(x < sampled.min_logits[at, None], -torch.inf)
    kept = (kept - kept.amax(-1, keepdim=True)) / settings.temperature[at, None]
    return kept.softmax(-1).nan_to_num(0.0)


def rejection_sample_reference(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """The same in plain torch."""
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
    # p and q may be equal but for rounding, and then nothing is left to draw
    kept |= scores == -torch.inf
    found = sampled.tokens.clone()
    some = p.sum(-1) > 0
    found[at] = torch.where(some, torch.where(kept, tokens, best), found[at])
    return found


def _is_accepted(target_probs: Tensor, draft_probs: Tensor, uniform: Tensor) -> Tensor:
    """Whether drafts of these probabilities are kept."""
    return uniform * draft_probs < target_probs


def _residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What a token is drawn from instead, up to a factor."""
    return (target_probs - draft_probs).clamp(min=0)


def sampling_probs_triton(
    sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor
) -> Tensor:
    """The same in one launch."""
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
    """The same in one launch, which overwrites sampled.tokens."""
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
    """A row's probabilities, float32 probs[program]."""
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
    """A row's draft or what replaces it, int64 sampled_tokens[row]."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    draft = tl.load(draft_tokens + tl.program_id(0))
    line, cut = logits + row * stride, tl.load(min_logits + row)
    of_draft = draft_probs + tl.program_id(0).to(tl.int64) * draft_probs_stride
    temperature = tl.load(temperatures + row)
    mix, position = tl.load(seed_hashes + row), tl.load(positions + row)
    peak, total = _max_and_exp_sum(line, vocab, cut, temperature, block)
    if peak >= _FLOAT32_MIN:
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
                first = tl.min(tl.where(scores == here, tokens, _NO_TOKEN))
                # where nothing is left, which is rounding, the draft stays
                token = tl.where(here > score, first, token)
                score = tl.maximum(here, score)
        tl.store(sampled_tokens + row, token.to(tl.int64))


@triton.jit
def _load_kept_logits(row_logits, tokens, vocab, min_logit):
    """Logits; what is not kept is at -inf."""
    values = tl.load(row_logits + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(values >= min_logit, values, -float("inf"))


@triton.jit
def _max_and_exp_sum(row_logits, vocab, min_logit, temperature, block: tl.constexpr):
    """The largest logit of a row, and the sum of exp((logit - largest) / temperature)."""
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, block):
        values = _load_kept_logits(row_logits, start + tl.arange(0, block), vocab, min_logit)
        higher = tl.maximum(peak, tl.max(values))
        base = tl.where(higher < _FLOAT32_MIN, 0.0, higher)
        total *= tl.exp((peak - base) / temperature)
        total += tl.sum(tl.exp((values - base) / temperature))
        peak = higher
    return peak, total


@triton.jit
def _probs(row_logits, tokens, vocab, min_logit, temperature, max_logit, exp_sum):
    """Probabilities of these tokens."""
    values = _load_kept_logits(row_logits, tokens, vocab, min_logit)
    base = tl.where(max_logit < _FLOAT32_MIN, 0.0, max_logit)
    return tl.exp((values - base) / temperature) / tl.where(exp_sum > 0, exp_sum, 1.0)


def variants() -> Iterator[Variant]:
    """For logits as the head gives them; penalties and biases make float32 of any."""
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
