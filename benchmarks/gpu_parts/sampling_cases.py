"""Cases of sampling on random logits: the kernel must sample the same tokens as its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import KernelCase, Sizes, Tensors
from benchmarks.gpu_parts.inputs import Inputs
from localgen.backends.cuda.kernels.sampling import sample
from localgen.backends.cuda.kernels.sampling.gumbel import hash_seed
from localgen.backends.cuda.kernels.sampling.sample import SamplingTensors

# share of rows that may differ, because two tokens can be nearly equal
DIFFERENT = 0.02
_EDITS = 3  # edited logits per row


def draws(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    vocab = 32 * sizes.hidden - 61
    for rows in (1, 4, 64):
        for kind in ("greedy", "plain", "top-k", "top-p", "min-p", "all", "edits"):
            yield _draw(make, rows, vocab, kind)


def _draw(make: Inputs, rows: int, vocab: int, kind: str) -> KernelCase:
    logits = make.normal(rows, vocab, std=3.0, dtype=torch.float32)
    settings = settings_of(make, rows, vocab, kind)

    def found() -> Tensors:
        drawn = sample.sample_tokens(logits, settings).tokens
        same = drawn == sample.sample_tokens_reference(logits.double(), settings).tokens
        return (same.double(),)

    def wanted() -> Tensors:
        return (torch.ones(rows, dtype=torch.float64, device=logits.device),)

    # the relative error of zeros and ones is the square root of the share that differs
    return KernelCase(
        "sample_tokens", f"{rows} × {vocab}, {kind}", found, wanted, math.sqrt(DIFFERENT)
    )


def settings_of(make: Inputs, rows: int, vocab: int, kind: str) -> SamplingTensors:
    def column(value: float) -> Tensor:
        return torch.full((rows,), value, device=make.device)

    seeds = make.integers(0, 2**31, rows).tolist()
    none = torch.empty(0, dtype=torch.int32, device=make.device)
    has = {name: kind in (name, "all") for name in ("top-k", "top-p", "min-p")}
    settings = SamplingTensors(
        temperature=column(0.0 if kind == "greedy" else 0.8),
        top_k=column(40 if has["top-k"] else 0).to(torch.int32),
        top_p=column(0.95 if has["top-p"] else 1.0),
        min_p=column(0.05 if has["min-p"] else 0.0),
        seed_hash=torch.tensor([hash_seed(seed) for seed in seeds], device=make.device),
        position=make.integers(1, 4096, rows),
        repeat_penalty=column(1.2),
        presence_penalty=column(0.3),
        frequency_penalty=column(0.2),
        edit_rows=none,
        edit_tokens=none,
        edit_counts=none.float(),
        edit_biases=none.float(),
    )
    if kind != "edits":
        return settings
    edits = rows * _EDITS
    return replace(
        settings,
        edit_rows=torch.arange(edits, device=make.device, dtype=torch.int32) // _EDITS,
        # each token at most once per row
        edit_tokens=make.permutation(vocab)[:_EDITS].repeat(rows).to(torch.int32),
        edit_counts=make.integers(0, 4, edits).float(),
        edit_biases=make.normal(edits, dtype=torch.float32),
    )
