"""Batched sampling: one token per row of logits, each row with its own sampling parameters.

Samplers run in llama.cpp's order: penalties, bias, top-k, top-p, min-p, temperature. A token is
drawn with the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014); the noise depends only on seed,
position and token. Ties: tokens equal to the last one that top-k or top-p keeps are kept too; among
equal scores the lowest token id wins. A token at -inf is never drawn, unless all are: then token 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch, next_power_of_2
from localgen.backends.cuda.kernels.sampling import kernels
from localgen.backends.cuda.kernels.sampling.gumbel import gumbel_noise

_PENALTIES_BLOCK = 128
_SAMPLE_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTensors:
    """Sampling parameters of each row, on the logits' device; float32 [rows] unless stated.

    temperature: 0 is greedy. top_k: int32, 0 disables it. top_p, min_p: 1 and 0 disable them.
    seed_hash: int64, gumbel.hash_seed of the seed. position: int64, of the token to draw.
    repeat_penalty, presence_penalty, frequency_penalty: see Keskar et al. 2019 and OpenAI's API.

    edit_rows, edit_tokens: int32 [edits], the logits to change, each at most once. edit_counts:
    float32 [edits], occurrences of the token, for the penalties. edit_biases: float32 [edits],
    added to the logits.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_hash: Tensor
    position: Tensor
    repeat_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    edit_rows: Tensor
    edit_tokens: Tensor
    edit_counts: Tensor
    edit_biases: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """Sampled tokens and the logits they were drawn from.

    tokens: int64 [rows]. logits: [rows, vocab], after penalties and biases. min_logits: [rows],
    truncation thresholds, smaller logits were excluded; undefined in greedy rows.
    """

    tokens: Tensor
    logits: Tensor
    min_logits: Tensor


def sample_tokens(logits: Tensor, settings: SamplingTensors) -> SamplerOutput:
    """Sample one token per row. logits: float [rows, vocab], not modified."""
    has_kernel = choose_kernel("sampling", logits) is Kernel.SAMPLE_TOKENS
    return (sample_tokens_triton if has_kernel else sample_tokens_reference)(logits, settings)


def sample_tokens_reference(logits: Tensor, settings: SamplingTensors) -> SamplerOutput:
    """PyTorch reference of `sample_tokens`."""
    x = upcast(logits)
    if len(settings.edit_rows):
        x = _apply_penalties(x, settings)
    greedy = settings.temperature == 0
    if bool(greedy.all()):
        return SamplerOutput(x.argmax(-1), x, x.new_full((len(x),), -torch.inf))
    least = _min_kept_logit(x, settings)
    kept = x.masked_fill(x < least, -torch.inf)
    noise = gumbel_noise(settings.seed_hash, settings.position, x.shape[-1])
    drawn = (kept / settings.temperature[:, None] + noise).argmax(-1)
    return SamplerOutput(torch.where(greedy, x.argmax(-1), drawn), x, least[:, 0])


def _apply_penalties(x: Tensor, settings: SamplingTensors) -> Tensor:
    rows, tokens = settings.edit_rows.long(), settings.edit_tokens.long()
    found, by, counts = x[rows, tokens], settings.repeat_penalty[rows], settings.edit_counts
    seen = torch.where(found > 0, found / by, found * by)
    seen = seen - counts * settings.frequency_penalty[rows] - settings.presence_penalty[rows]
    x = x.clone()
    x[rows, tokens] = torch.where(counts > 0, seen, found) + settings.edit_biases
    return x


def _min_kept_logit(x: Tensor, settings: SamplingTensors) -> Tensor:
    """Return the truncation threshold: the lowest logit that is kept, [rows, 1]."""
    best = x.amax(-1, keepdim=True)
    lowest = best + settings.min_p[:, None].log()
    k, mass = settings.top_k.long()[:, None], settings.top_p[:, None].double()
    has_k, has_mass = (k > 0) & (k < x.shape[-1]), mass < 1
    if not bool((has_k | has_mass).any()):
        return lowest
    ordered = x.sort(-1, descending=True).values
    last = ordered.gather(-1, torch.where(has_k, k, 1) - 1)
    lowest = torch.maximum(lowest, torch.where(has_k, last, -torch.inf))
    # top-p (Holtzman et al. 2020) applies to the tokens that top-k kept
    weights = (ordered - ordered[:, :1]).nan_to_num(neginf=-torch.inf).double().exp()
    weights = weights.masked_fill(has_k & (ordered < last), 0)
    summed = weights.cumsum(-1)
    place = (summed < mass * summed[:, -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return torch.maximum(lowest, torch.where(has_mass, ordered.gather(-1, place), -torch.inf))


def sample_tokens_triton(logits: Tensor, settings: SamplingTensors) -> SamplerOutput:
    """Triton implementation of `sample_tokens`: two launches.

    Penalties and biases need a copy of the logits and a third launch.
    """
    rows, vocab = logits.shape
    if edits := len(settings.edit_rows):
        logits = logits.to(torch.float32, copy=True)
        _apply_penalties_triton(logits, settings, edits)
    assert logits.stride(1) == 1
    chunk_groups, num_warps = _scan_groups_and_warps(rows)
    groups = ceil_div(vocab, kernels.GROUP_TOKENS)
    splits = ceil_div(groups, chunk_groups)

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    shared = (
        logits,
        logits.stride(0),
        vocab,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.seed_hash,
        settings.position,
        room(rows, groups),
        room(rows, 3, splits),
        room(rows, splits, dtype=torch.int32),
        splits,
        groups,
    )
    launch(kernels.scan_logits_kernel, (rows, splits))(
        *shared, chunk_groups=chunk_groups, num_warps=num_warps
    )
    chosen, least = room(rows, dtype=torch.int64), room(rows)
    launch(kernels.sample_token_kernel, (rows,))(
        *shared,
        room(rows, groups, dtype=torch.int32),
        chosen,
        least,
        splits_block=next_power_of_2(splits),
        groups_block=next_power_of_2(groups),
        num_warps=_SAMPLE_WARPS,
    )
    return SamplerOutput(chosen, logits, least)


def _apply_penalties_triton(logits: Tensor, settings: SamplingTensors, num_edits: int) -> None:
    launch(kernels.apply_penalties_kernel, (ceil_div(num_edits, _PENALTIES_BLOCK),))(
        logits,
        logits.stride(0),
        settings.edit_rows,
        settings.edit_tokens,
        settings.edit_counts,
        settings.edit_biases,
        settings.repeat_penalty,
        settings.presence_penalty,
        settings.frequency_penalty,
        num_edits,
        block=_PENALTIES_BLOCK,
        num_warps=4,
    )


def _scan_groups_and_warps(rows: int) -> tuple[int, int]:
    """Return the groups and warps per program of scan_logits_kernel; few rows get more programs."""
    return (16, 4) if rows <= 4 else (64, 8)


def variants() -> Iterator[Variant]:
    """Both chunk sizes, with the smallest and the largest vocabularies of common models."""
    pointers = {
        **dict.fromkeys(("temperatures",), "*fp32"),
        "top_ks": "*i32",
        **dict.fromkeys(("top_ps", "min_ps"), "*fp32"),
        **dict.fromkeys(("seed_hashes", "positions"), "*i64"),
        **dict.fromkeys(("group_max", "split_stats"), "*fp32"),
        "split_best_tokens": "*i32",
        **dict.fromkeys(("num_splits", "num_groups"), "i32"),
    }
    for kind in ("fp32", "bf16"):
        first = {"logits": f"*{kind}", "stride": "i32", "vocab": "i32", **pointers}
        for rows in (1, 64):
            chunk_groups, num_warps = _scan_groups_and_warps(rows)
            yield Variant(
                name=f"scan-logits-{rows}-{kind}",
                kernel=kernels.scan_logits_kernel,
                signature={**first, "chunk_groups": "constexpr"},
                constants={"chunk_groups": chunk_groups},
                num_warps=num_warps,
            )
    first = {"logits": "*fp32", "stride": "i32", "vocab": "i32", **pointers}
    for rows, vocab in ((1, 32003), (1, 128256), (1, 151936), (64, 262208)):
        groups = ceil_div(vocab, kernels.GROUP_TOKENS)
        blocks = {
            "splits_block": next_power_of_2(ceil_div(groups, _scan_groups_and_warps(rows)[0])),
            "groups_block": next_power_of_2(groups),
        }
        yield Variant(
            name=f"sample-token-{rows}-{vocab}",
            kernel=kernels.sample_token_kernel,
            signature={
                **first,
                "candidate_groups": "*i32",
                "sampled_tokens": "*i64",
                "min_logits": "*fp32",
                **dict.fromkeys(blocks, "constexpr"),
            },
            constants=blocks,
            num_warps=_SAMPLE_WARPS,
        )
    penalties = ("repeat_penalties", "presence_penalties", "frequency_penalties")
    yield Variant(
        name="apply-penalties",
        kernel=kernels.apply_penalties_kernel,
        signature={
            "logits": "*fp32",
            "stride": "i32",
            **dict.fromkeys(("rows", "tokens"), "*i32"),
            **dict.fromkeys(("counts", "biases", *penalties), "*fp32"),
            "num_edits": "i32",
            "block": "constexpr",
        },
        constants={"block": _PENALTIES_BLOCK},
    )
