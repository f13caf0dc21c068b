"""Cases of rejection sampling with sampled drafts, on random logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_parts.case import KernelCase, Sizes, Tensors
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.sampling_cases import DIFFERENT, settings_of
from localgen.backends.cuda.kernels.sampling import rejection, sample
from localgen.backends.cuda.kernels.sampling.rejection import SampledDrafts
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput


def rejections(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    vocab = 32 * sizes.hidden - 61
    for rows in (1, 4, 64):
        yield _probabilities(make, rows, vocab)
        yield _verify(make, rows, vocab)


def _probabilities(make: Inputs, rows: int, vocab: int) -> KernelCase:
    drawn, asked, every = _drawn(make, rows, vocab)

    def found() -> Tensors:
        return (rejection.sampling_probs(drawn, asked, every),)

    def wanted() -> Tensors:
        exact = replace(drawn, logits=drawn.logits.double())
        return (rejection.sampling_probs_reference(exact, asked, every),)

    return KernelCase("sampling_probs", f"{rows} × {vocab}", found, wanted)


def _verify(make: Inputs, rows: int, vocab: int) -> KernelCase:
    drawn, asked, every = _drawn(make, rows, vocab)
    # close to the target's distribution, so that many drafts are accepted and many rejected
    nearby = drawn.logits + make.normal(rows, vocab, std=0.5, dtype=torch.float32)
    q = rejection.sampling_probs_reference(replace(drawn, logits=nearby), asked, every)
    tokens = q.multinomial(1)[:, 0].to(torch.int32)
    drafts = SampledDrafts(every, tokens, q)

    def found() -> Tensors:
        exact = replace(drawn, logits=drawn.logits.double())
        wanted = rejection.rejection_sample_reference(exact, asked, drafts)
        # the kernel writes to its inputs
        given = replace(drawn, tokens=drawn.tokens.clone())
        return ((rejection.rejection_sample(given, asked, drafts) == wanted).double(),)

    def wanted() -> Tensors:
        return (torch.ones(rows, dtype=torch.float64, device=drawn.logits.device),)

    # share of rows that may differ, as in sampling_cases
    return KernelCase("rejection_sample", f"{rows} × {vocab}", found, wanted, math.sqrt(DIFFERENT))


def _drawn(
    make: Inputs, rows: int, vocab: int
) -> tuple[SamplerOutput, sample.SamplingTensors, torch.Tensor]:
    logits = make.normal(rows, vocab, std=3.0, dtype=torch.float32)
    asked = settings_of(make, rows, vocab, "top-k")
    every = torch.arange(rows, device=make.device, dtype=torch.int32)
    return sample.sample_tokens(logits, asked), asked, every
