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

from localgen.backends.cuda.kernels.device import has_kernels, wide
from localgen.backends.cuda.kernels.launch import Variant, launch
from localgen.backends.cuda.kernels.sampling.gumbel import coin, gumbel, tl_coin, tl_gumbel
from localgen.backends.cuda.kernels.sampling.sample import Drawn, SamplingTensors

_BLOCK = 4096
_WARPS = 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NO_TOKEN = tl.constexpr(2**31 - 1)
# columns of packed copies: where they begin must not decide what is compiled
_PACKED = ["rows", "drafts", "temperatures", "mixes", "positions"]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts and what they were drawn from.

    rows: int32 [drafts], the rows that verify them, each once. tokens: int32 [drafts]. q: float32
    [drafts, any vocabulary], probabilities; beyond its own a vocabulary has none.
    """

    rows: Tensor
    tokens: Tensor
    q: Tensor


def probabilities(drawn: Drawn, settings: SamplingTensors, rows: Tensor) -> Tensor:
    """What the tokens of these rows were drawn from, float [len(rows), vocab].

    rows: int32, none of them greedy. Where no token can be drawn, all are 0.
    """
    by = probabilities_triton if has_kernels(drawn.logits) else probabilities_reference
    return by(drawn, settings, rows)


def verify(drawn: Drawn, settings: SamplingTensors, drafts: Drafts) -> Tensor:
    """Tokens of all rows, int64 [rows]: in the rows of drafts, the draft or what replaces it.

    drawn.tokens may be overwritten. Rows of drafts are not greedy.
    """
    return (verify_triton if has_kernels(drawn.logits) else verify_reference)(
        drawn, settings, drafts
    )


def probabilities_reference(drawn: Drawn, settings: SamplingTensors, rows: Tensor) -> Tensor:
    """The same in plain torch."""
    at = rows.long()
    x = wide(drawn.logits)[at]
    kept = x.masked_fill(x < drawn.least[at, None], -torch.inf)
    kept = (kept - kept.amax(-1, keepdim=True)) / settings.temperature[at, None]
    return kept.softmax(-1).nan_to_num(0.0)


def verify_reference(drawn: Drawn, settings: SamplingTensors, drafts: Drafts) -> Tensor:
    """The same in plain torch."""
    at, tokens = drafts.rows.long(), drafts.tokens.long()
    p = probabilities_reference(drawn, settings, drafts.rows)
    q = torch.nn.functional.pad(drafts.q, (0, p.shape[-1] - drafts.q.shape[-1])).to(p.dtype)
    mixes, positions = settings.seed_mix[at], settings.position[at]
    of_draft = tokens[:, None]
    kept = _is_kept(
        p.gather(-1, of_draft)[:, 0], q.gather(-1, of_draft)[:, 0], coin(mixes, positions)
    )
    left = _left(p, q)
    scores, best = (left.log() + gumbel(mixes, positions, p.shape[-1])).max(-1)
    # p and q may be equal but for rounding, and then nothing is left to draw
    kept |= scores == -torch.inf
    found = drawn.tokens.clone()
    some = p.sum(-1) > 0
    found[at] = torch.where(some, torch.where(kept, tokens, best), found[at])
    return found


def _is_kept(p: Tensor, q: Tensor, coins: Tensor) -> Tensor:
    """Whether drafts of these probabilities are kept."""
    return coins * q < p


def _left(p: Tensor, q: Tensor) -> Tensor:
    """What a token is drawn from instead, up to a factor."""
    return (p - q).clamp(min=0)


def probabilities_triton(drawn: Drawn, settings: SamplingTensors, rows: Tensor) -> Tensor:
    """The same in one launch."""
    vocab = drawn.logits.shape[1]
    found = torch.empty((len(rows), vocab), dtype=torch.float32, device=drawn.logits.device)
    launch(_distribute, (len(rows),))(
        *(drawn.logits, drawn.logits.stride(0), vocab, drawn.least, rows),
        *(settings.temperature, found),
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return found


def verify_triton(drawn: Drawn, settings: SamplingTensors, drafts: Drafts) -> Tensor:
    """The same in one launch, which overwrites drawn.tokens."""
    assert drafts.q.stride(1) == 1
    launch(_verify, (len(drafts.rows),))(
        *(drawn.logits, drawn.logits.stride(0), drawn.logits.shape[1], drawn.least, drafts.rows),
        *(settings.temperature, settings.seed_mix, settings.position),
        *(drafts.tokens, drafts.q, drafts.q.stride(0), drafts.q.shape[1], drawn.tokens),
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return drawn.tokens


@triton.jit(do_not_specialize_on_alignment=_PACKED)
def _distribute(logits, stride, vocab, least, rows, temperatures, found, block: tl.constexpr):
    """A row's probabilities, float32 found[program]."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    line, cut = logits + row * stride, tl.load(least + row)
    temperature = tl.load(temperatures + row)
    peak, total = _mass(line, vocab, cut, temperature, block)
    target = found + tl.program_id(0).to(tl.int64) * vocab
    for start in range(0, vocab, block):
        tokens = start + tl.arange(0, block)
        p = _shares(line, tokens, vocab, cut, temperature, peak, total)
        tl.store(target + tokens, p, mask=tokens < vocab)


@triton.jit(do_not_specialize_on_alignment=_PACKED)
def _verify(
    logits,
    stride,
    vocab,
    least,
    rows,
    temperatures,
    mixes,
    positions,
    drafts,
    q,
    q_stride,
    q_vocab,
    chosen,
    block: tl.constexpr,
):
    """A row's draft or what replaces it, int64 chosen[row]."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    draft = tl.load(drafts + tl.program_id(0))
    line, cut = logits + row * stride, tl.load(least + row)
    of_draft = q + tl.program_id(0).to(tl.int64) * q_stride
    temperature = tl.load(temperatures + row)
    mix, position = tl.load(mixes + row), tl.load(positions + row)
    peak, total = _mass(line, vocab, cut, temperature, block)
    if peak >= _LOWEST:
        own = tl.max(_shares(line, draft + tl.arange(0, 1), vocab, cut, temperature, peak, total))
        theirs = tl.load(of_draft + draft, mask=draft < q_vocab, other=0.0)
        token = draft
        if tl_coin(mix, position) * theirs >= own:
            score = tl.full((), -float("inf"), tl.float32)
            for start in range(0, vocab, block):
                tokens = start + tl.arange(0, block)
                p = _shares(line, tokens, vocab, cut, temperature, peak, total)
                left = p - tl.load(of_draft + tokens, mask=tokens < q_vocab, other=0.0)
                noise = tl_gumbel(mix, position, tokens)
                scores = tl.where(left > 0, tl.log(left) + noise, -float("inf"))
                here = tl.max(scores)
                first = tl.min(tl.where(scores == here, tokens, _NO_TOKEN))
                # where nothing is left, which is rounding, the draft stays
                token = tl.where(here > score, first, token)
                score = tl.maximum(here, score)
        tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _kept(line, tokens, vocab, cut):
    """Logits; what is not kept is at -inf."""
    values = tl.load(line + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(values >= cut, values, -float("inf"))


@triton.jit
def _mass(line, vocab, cut, temperature, block: tl.constexpr):
    """The largest logit of a row, and the sum of exp((logit - largest) / temperature)."""
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, block):
        values = _kept(line, start + tl.arange(0, block), vocab, cut)
        higher = tl.maximum(peak, tl.max(values))
        base = tl.where(higher < _LOWEST, 0.0, higher)
        total *= tl.exp((peak - base) / temperature)
        total += tl.sum(tl.exp((values - base) / temperature))
        peak = higher
    return peak, total


@triton.jit
def _shares(line, tokens, vocab, cut, temperature, peak, total):
    """Probabilities of these tokens."""
    values = _kept(line, tokens, vocab, cut)
    base = tl.where(peak < _LOWEST, 0.0, peak)
    return tl.exp((values - base) / temperature) / tl.where(total > 0, total, 1.0)


def variants() -> Iterator[Variant]:
    """For logits as the head gives them; penalties and biases make float32 of any."""
    first = {
        "logits": "*fp32",
        "stride": "i32",
        "vocab": "i32",
        "least": "*fp32",
        "rows": "*i32",
        "temperatures": "*fp32",
    }
    drafts = {
        "mixes": "*i64",
        "positions": "*i64",
        "drafts": "*i32",
        "q": "*fp32",
        "q_stride": "i32",
        "q_vocab": "i32",
        "chosen": "*i64",
    }
    for kernel, more in ((_distribute, {"found": "*fp32"}), (_verify, drafts)):
        yield Variant(
            name=kernel.fn.__name__.strip("_"),
            kernel=kernel,
            signature={**first, **more, "block": "constexpr"},
            constants={"block": _BLOCK},
            num_warps=_WARPS,
        )
