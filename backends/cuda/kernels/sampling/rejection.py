"""Rejection sampling of sampled draft tokens; the output has exactly the target's distribution.

A draft token d sampled from q is accepted with probability min(1, p(d) / q(d)). Otherwise a token
is sampled from the residual max(0, p - q), which never yields d (Leviathan et al. 2023; Chen et al.
2023). p is the target's distribution after all sampling parameters. The noise that sampled the
draft must be independent of the row's noise.

The kernels divide a row into chunks, one program each, as a single program would wait for the loads
of a large vocabulary one after the other. The chunks' partial results are combined in a fixed
order, so results repeat bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch, next_power_of_2
from localgen.backends.cuda.kernels.sampling.gumbel import (
    gumbel_noise,
    tl_gumbel_noise,
    tl_uniform_noise,
    uniform_noise,
)
from localgen.backends.cuda.kernels.sampling.kernels import (
    FLOAT32_MIN,
    NO_TOKEN,
    load_or_neg_inf,
    tl_argmax,
)
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput, SamplingTensors

# tokens of a program
_CHUNK = 2048
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
    chosen = sampling_probs_triton if _has_kernel(sampled) else sampling_probs_reference
    return chosen(sampled, settings, rows)


def rejection_sample(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """Return the tokens of all rows, int64 [rows], with drafts accepted or replaced.

    sampled.tokens may be overwritten. Rows with a draft are not greedy.
    """
    chosen = rejection_sample_triton if _has_kernel(sampled) else rejection_sample_reference
    return chosen(sampled, settings, drafts)


def _has_kernel(sampled: SamplerOutput) -> bool:
    return choose_kernel("drafts", sampled.logits) is Kernel.REJECTION_SAMPLE


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
    """Triton implementation of `sampling_probs`, two launches."""
    shape = (len(rows), sampled.logits.shape[1])
    found = torch.empty(shape, dtype=torch.float32, device=sampled.logits.device)
    _launch_chunks(_sampling_probs_kernel, _sum_exps(sampled, settings, rows), found)
    return found


def rejection_sample_triton(
    sampled: SamplerOutput, settings: SamplingTensors, drafts: SampledDrafts
) -> Tensor:
    """Triton implementation of `rejection_sample`, three launches; overwrites sampled.tokens."""
    q = drafts.draft_probs
    assert q.stride(1) == 1
    of_rows = _sum_exps(sampled, settings, drafts.rows)
    shape = (len(drafts.rows), of_rows.num_splits)
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    tokens = torch.empty(shape, dtype=torch.int32, device=q.device)
    _launch_chunks(
        *(_rejection_sample_kernel, of_rows, settings.seed_hash, settings.position),
        *(drafts.tokens, q, q.stride(0), q.shape[1], sampled.tokens, scores, tokens),
    )
    launch(_combine_chunks_kernel, (len(drafts.rows),))(
        *(scores, tokens, drafts.rows, sampled.tokens, of_rows.num_splits),
        splits_block=next_power_of_2(of_rows.num_splits),
        num_warps=1,
    )
    return sampled.tokens


class _RowArgs(NamedTuple):
    """First arguments of the kernels that divide rows. stats: see _sum_exps_kernel."""

    logits: Tensor
    stride: int
    vocab: int
    min_logits: Tensor
    rows: Tensor
    temperatures: Tensor
    stats: Tensor
    num_splits: int


def _sum_exps(sampled: SamplerOutput, settings: SamplingTensors, rows: Tensor) -> _RowArgs:
    """Launch _sum_exps_kernel."""
    logits, num_splits = sampled.logits, ceil_div(sampled.logits.shape[1], _CHUNK)
    shape = (len(rows), 2, num_splits)
    args = _RowArgs(
        *(logits, logits.stride(0), logits.shape[1], sampled.min_logits, rows),
        *(settings.temperature, torch.empty(shape, dtype=torch.float32, device=logits.device)),
        num_splits,
    )
    launch(_sum_exps_kernel, (len(rows), num_splits))(*args, chunk=_CHUNK, num_warps=_WARPS)
    return args


def _launch_chunks(kernel: Any, of_rows: _RowArgs, *args: Tensor | int) -> None:
    """Launch a kernel that combines the sums of all chunks, and then computes one chunk."""
    launch(kernel, (len(of_rows.rows), of_rows.num_splits))(
        *of_rows,
        *args,
        chunk=_CHUNK,
        splits_block=next_power_of_2(of_rows.num_splits),
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_UNALIGNED_ARGS)
def _sum_exps_kernel(
    logits, stride, vocab, min_logits, rows, temperatures, stats, num_splits, chunk: tl.constexpr
):
    """Write a chunk's largest logit and sum of exp((logit - largest) / temperature).

    Output: stats, float32 [len(rows), 2, splits].
    """
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    values = _load_kept_logits(logits + row * stride, tokens, vocab, tl.load(min_logits + row))
    peak = tl.max(values)
    base = tl.where(peak < FLOAT32_MIN, 0.0, peak)
    place = stats + tl.program_id(0).to(tl.int64) * 2 * num_splits + tl.program_id(1)
    tl.store(place, peak)
    tl.store(place + num_splits, tl.sum(tl.exp((values - base) / tl.load(temperatures + row))))


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_UNALIGNED_ARGS)
def _sampling_probs_kernel(
    logits,
    stride,
    vocab,
    min_logits,
    rows,
    temperatures,
    stats,
    num_splits,
    probs,
    chunk: tl.constexpr,
    splits_block: tl.constexpr,
):
    """Write the probabilities of a chunk, float32, to row program_id(0) of probs."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak, total = _max_and_exp_sum(stats, num_splits, temperature, splits_block)
    tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
    line, cut = logits + row * stride, tl.load(min_logits + row)
    p = _probs(line, tokens, vocab, cut, temperature, peak, total)
    target = probs + tl.program_id(0).to(tl.int64) * vocab
    tl.store(target + tokens, p, mask=tokens < vocab)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_UNALIGNED_ARGS)
def _rejection_sample_kernel(
    logits,
    stride,
    vocab,
    min_logits,
    rows,
    temperatures,
    stats,
    num_splits,
    seed_hashes,
    positions,
    draft_tokens,
    draft_probs,
    draft_probs_stride,
    draft_vocab,
    sampled_tokens,
    split_scores,
    split_tokens,
    chunk: tl.constexpr,
    splits_block: tl.constexpr,
):
    """Write the best replacement of a chunk and its score, -inf if the draft is kept.

    Outputs: split_scores, float32 [drafts, splits]; split_tokens, int32 [drafts, splits]. With a
    score of -inf, the token of all chunks is the draft, or the sampled one if all are banned.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number).to(tl.int64)
    draft = tl.load(draft_tokens + number)
    line, cut = logits + row * stride, tl.load(min_logits + row)
    of_draft = draft_probs + number * draft_probs_stride
    temperature = tl.load(temperatures + row)
    mix, position = tl.load(seed_hashes + row), tl.load(positions + row)
    peak, total = _max_and_exp_sum(stats, num_splits, temperature, splits_block)
    score, token = tl.full((), -float("inf"), tl.float32), draft
    if peak >= FLOAT32_MIN:
        own = tl.max(_probs(line, draft + tl.arange(0, 1), vocab, cut, temperature, peak, total))
        theirs = tl.load(of_draft + draft, mask=draft < draft_vocab, other=0.0)
        if tl_uniform_noise(mix, position) * theirs >= own:
            tokens = tl.program_id(1) * chunk + tl.arange(0, chunk)
            p = _probs(line, tokens, vocab, cut, temperature, peak, total)
            left = p - tl.load(of_draft + tokens, mask=tokens < draft_vocab, other=0.0)
            noise = tl_gumbel_noise(mix, position, tokens)
            scores = tl.where(left > 0, tl.log(left) + noise, -float("inf"))
            score, first = tl_argmax(scores, tokens)
            # no replacement in this chunk; if in none, due to rounding, the draft is kept
            token = tl.where(score == -float("inf"), draft, first)
    else:
        token = tl.load(sampled_tokens + row).to(tl.int32)
    place = number * num_splits + tl.program_id(1)
    tl.store(split_scores + place, score)
    tl.store(split_tokens + place, token)


@triton.jit(
    do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["rows", "sampled_tokens"]
)
def _combine_chunks_kernel(
    split_scores, split_tokens, rows, sampled_tokens, num_splits, splits_block: tl.constexpr
):
    """Write the accepted draft or its replacement, int64, to sampled_tokens[row]."""
    begin = tl.program_id(0).to(tl.int64) * num_splits
    split = tl.arange(0, splits_block)
    scores = load_or_neg_inf(split_scores + begin, split, num_splits)
    tokens = tl.load(split_tokens + begin + split, mask=split < num_splits, other=NO_TOKEN)
    _, token = tl_argmax(scores, tokens)
    tl.store(sampled_tokens + tl.load(rows + tl.program_id(0)).to(tl.int64), token.to(tl.int64))


@triton.jit
def _load_kept_logits(row_logits, tokens, vocab, min_logit):
    """Load logits as float32; those below min_logit become -inf."""
    values = load_or_neg_inf(row_logits, tokens, vocab).to(tl.float32)
    return tl.where(values >= min_logit, values, -float("inf"))


@triton.jit
def _max_and_exp_sum(stats, num_splits, temperature, splits_block: tl.constexpr):
    """Combine the chunks of row program_id(0); see _sum_exps_kernel."""
    split = tl.arange(0, splits_block)
    of_row = stats + tl.program_id(0).to(tl.int64) * 2 * num_splits
    peaks = load_or_neg_inf(of_row, split, num_splits)
    sums = tl.load(of_row + num_splits + split, mask=split < num_splits, other=0.0)
    peak = tl.max(peaks)
    base = tl.where(peak < FLOAT32_MIN, 0.0, peak)
    return peak, tl.sum(sums * tl.exp((peaks - base) / temperature))


@triton.jit
def _probs(row_logits, tokens, vocab, min_logit, temperature, max_logit, exp_sum):
    """Return the probabilities of these tokens."""
    values = _load_kept_logits(row_logits, tokens, vocab, min_logit)
    base = tl.where(max_logit < FLOAT32_MIN, 0.0, max_logit)
    return tl.exp((values - base) / temperature) / tl.where(exp_sum > 0, exp_sum, 1.0)


def variants() -> Iterator[Variant]:
    """All kernels, for float32 logits and the largest vocabularies of common models."""
    first = {
        "logits": "*fp32",
        **dict.fromkeys(("stride", "vocab"), "i32"),
        "min_logits": "*fp32",
        "rows": "*i32",
        **dict.fromkeys(("temperatures", "stats"), "*fp32"),
        "num_splits": "i32",
    }
    drafts = {
        **dict.fromkeys(("seed_hashes", "positions"), "*i64"),
        "draft_tokens": "*i32",
        "draft_probs": "*fp32",
        **dict.fromkeys(("draft_probs_stride", "draft_vocab"), "i32"),
        "sampled_tokens": "*i64",
        "split_scores": "*fp32",
        "split_tokens": "*i32",
    }
    combine = {
        "split_scores": "*fp32",
        **dict.fromkeys(("split_tokens", "rows"), "*i32"),
        "sampled_tokens": "*i64",
        "num_splits": "i32",
    }
    for vocab in (128256, 32003, 262208):
        blocks = {"chunk": _CHUNK, "splits_block": next_power_of_2(ceil_div(vocab, _CHUNK))}
        for kernel, types, num_warps in (
            (_sum_exps_kernel, first, _WARPS),
            (_sampling_probs_kernel, {**first, "probs": "*fp32"}, _WARPS),
            (_rejection_sample_kernel, first | drafts, _WARPS),
            (_combine_chunks_kernel, combine, 1),
        ):
            constants = {name: blocks[name] for name in kernel.arg_names if name in blocks}
            if vocab != 128256 and "splits_block" not in constants:
                continue  # the same kernel
            yield Variant(
                name=kernel.fn.__name__.strip("_") + (f"-{vocab}" if vocab != 128256 else ""),
                kernel=kernel,
                signature={**types, **dict.fromkeys(constants, "constexpr")},
                constants=constants,
                num_warps=num_warps,
            )
