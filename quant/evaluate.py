"""Perplexity and KL divergence on held-out text, computed one layer and one vocabulary slice at a
time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.fp8_rows import quantize_rows_fp8_reference
from localgen.backends.formats.hf.tensor_names import layer_names
from localgen.quant.calibrate.layer_forward import (
    InputHook,
    LayerForward,
    compute_logits,
    embed_windows,
)
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint

# tokens of one pass through a layer; tokens and outputs of one product with the head
_BATCH_TOKENS = 2048
_HEAD_TOKENS = 512
_HEAD_ROWS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class EvalMetrics:
    """Mean losses of each window, in nats per token: float64 [windows].

    window_nll: negative log likelihood of all tokens but the first. window_kl: Kullback-Leibler
    divergence of the next-token distribution from the original's; None for the original, or a
    model with another vocabulary.
    """

    window_nll: NDArray[np.float64]
    window_kl: NDArray[np.float64] | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.window_nll.mean()))

    @property
    def kl(self) -> float | None:
        return None if self.window_kl is None else float(self.window_kl.mean())


@dataclass(frozen=True, slots=True, eq=False)
class FinalStates:
    """Output of a model's last layer. hidden: float32 [windows, length, hidden] for `ids`."""

    source: LayerwiseCheckpoint
    ids: Tensor
    hidden: Tensor


@torch.no_grad()
def compute_final_states(
    source: LayerwiseCheckpoint,
    ids: Tensor,
    device: torch.device | str = "cpu",
    on_layer: Callable[[int], None] = lambda done: None,
) -> FinalStates:
    """Run windows through a model, one layer in memory at a time. ids: int64 [windows, length].

    on_layer: called with the number of finished layers.
    """
    spec, length = source.spec, ids.shape[1]
    forward = LayerForward(spec, length, device)
    hidden = embed_windows(source, ids)
    hook = _activation_rounding_hook(source)
    each = max(1, _BATCH_TOKENS // length)
    for index in range(spec.num_layers):
        tensors = source.read_layer(index, device)
        for part in torch.split(hidden, each):
            part.copy_(forward.run(index, tensors, part.to(device), hook))
        on_layer(index + 1)
    return FinalStates(source, ids, hidden)


@torch.no_grad()
def compute_metrics(
    models: Sequence[FinalStates], device: torch.device | str = "cpu"
) -> list[EvalMetrics]:
    """Metrics of each model; those with the first model's tokens are compared with it."""
    first = models[0]
    comparable = [one is first or _same_tokens(one, first) for one in models]
    compared = iter(_compare_with_first(list(compress(models, comparable)), device))
    return [
        next(compared) if same else _compare_with_first([one], device)[0]
        for one, same in zip(models, comparable, strict=True)
    ]


@torch.no_grad()
def window_logits(model: FinalStates, index: int, device: torch.device | str = "cpu") -> Tensor:
    """Logits of one window: float32 [length, vocab]."""
    head = _LmHead(model, device)
    hidden = model.hidden[index].to(device)
    parts = [head.logits(part, hidden).cpu() for part in head.vocab_slices()]
    return torch.cat(parts, -1)


class LossAccumulator:
    """Sums for the losses of `tokens` tokens, accumulated over vocabulary slices."""

    def __init__(self, tokens: int) -> None:
        self._max = torch.full((tokens,), -math.inf, dtype=torch.float64)
        self._sum = torch.zeros(tokens, dtype=torch.float64)
        self._target = torch.zeros(tokens, dtype=torch.float64)
        self._weighted_logit_difference = torch.zeros(tokens, dtype=torch.float64)

    def add(
        self,
        block: slice,
        vocab_start: int,
        model_logits: Tensor,
        targets: Tensor,
        reference_logits: Tensor | None = None,
    ) -> None:
        """Add the logits of one vocabulary slice for a block of tokens.

        model_logits: float32 [block, outputs] for vocabulary entries from vocab_start on. targets:
        [block], the next tokens. reference_logits: another model's; the sums are then those of the
        reference, and of its weighted difference from model_logits.
        """
        leading = model_logits if reference_logits is None else reference_logits
        most = torch.maximum(self._max[block], leading.amax(-1).double().cpu())
        shrink = (self._max[block] - most).exp()
        shares = (leading - most.to(leading.device).float()[:, None]).exp()
        self._max[block] = most
        self._sum[block] = self._sum[block] * shrink + _sum_exactly(shares)
        if reference_logits is not None:
            self._weighted_logit_difference[block] = self._weighted_logit_difference[
                block
            ] * shrink + _sum_exactly(shares * (reference_logits - model_logits))
        within = (targets >= vocab_start) & (targets < vocab_start + model_logits.shape[1])
        rows = within.nonzero().flatten()
        columns = targets[rows] - vocab_start
        found = leading[rows.to(leading.device), columns.to(leading.device)]
        self._target[block.start + rows] = found.double().cpu()

    @property
    def log_sum(self) -> Tensor:
        """log Σ exp(logits) over the vocabulary: float64 [tokens]."""
        return self._max + self._sum.log()

    def window_nll(self, num_windows: int) -> NDArray[np.float64]:
        """Mean negative log likelihood of each of num_windows equal parts of the tokens."""
        return _window_means(self.log_sum - self._target, num_windows)

    def window_kl(self, model: LossAccumulator, num_windows: int) -> NDArray[np.float64]:
        """Mean KL(reference || model) of each window, for sums added with reference_logits."""
        moved = self._weighted_logit_difference / self._sum
        return _window_means(moved - self.log_sum + model.log_sum, num_windows)


def _compare_with_first(
    models: Sequence[FinalStates], device: torch.device | str
) -> list[EvalMetrics]:
    """Metrics of models with the same tokens; the first one is the original."""
    ids = models[0].ids
    targets = ids[:, 1:].flatten()
    states = [one.hidden[:, :-1].flatten(0, 1) for one in models]
    heads = [_LmHead(one, device) for one in models]
    own = [LossAccumulator(len(targets)) for _ in models]
    paired = [LossAccumulator(len(targets)) for _ in models]
    for part in heads[0].vocab_slices():
        weights = [head.read_weight_rows(part) for head in heads]
        for start in range(0, len(targets), _HEAD_TOKENS):
            block = slice(start, min(start + _HEAD_TOKENS, len(targets)))
            found = [
                head.logits_from_weight(weight, hidden[block].to(device))
                for head, weight, hidden in zip(heads, weights, states, strict=True)
            ]
            for index, values in enumerate(found):
                own[index].add(block, part.start, values, targets[block])
                if index:
                    paired[index].add(block, part.start, values, targets[block], found[0])
    count = len(ids)
    kls = [None, *(paired[i].window_kl(own[i], count) for i in range(1, len(models)))]
    return [EvalMetrics(sums.window_nll(count), kl) for sums, kl in zip(own, kls, strict=True)]


class _LmHead:
    """Final norm and LM head of a model, one vocabulary slice at a time."""

    def __init__(self, model: FinalStates, device: torch.device | str) -> None:
        self._source, self._device = model.source, device
        tied = model.source.spec.tied_embeddings
        self._name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self._norm = model.source.read("model.norm.weight").to(device).float()

    def vocab_slices(self) -> list[slice]:
        vocab = self._source.spec.vocab_size
        return [slice(at, min(at + _HEAD_ROWS, vocab)) for at in range(0, vocab, _HEAD_ROWS)]

    def read_weight_rows(self, part: slice) -> Tensor:
        return self._source.read_rows(self._name, part.start, part.stop).to(self._device).float()

    def logits_from_weight(self, weight: Tensor, hidden: Tensor) -> Tensor:
        return compute_logits(self._source.spec, self._norm, weight, hidden)

    def logits(self, part: slice, hidden: Tensor) -> Tensor:
        return self.logits_from_weight(self.read_weight_rows(part), hidden)


def _same_tokens(one: FinalStates, other: FinalStates) -> bool:
    vocabs = one.source.spec.vocab_size == other.source.spec.vocab_size
    return vocabs and torch.equal(one.ids, other.ids)


def _window_means(values: Tensor, num_windows: int) -> NDArray[np.float64]:
    return np.asarray(values.view(num_windows, -1).mean(1).numpy(), np.float64)


def _sum_exactly(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.float64).cpu()


def _activation_rounding_hook(source: LayerwiseCheckpoint) -> InputHook | None:
    """Hook that rounds the inputs of quantized linears per token, in place, as W8A8 engines do;
    None for other formats."""
    quant = source.spec.quant
    if quant is None or quant.method not in ("int8", "fp8"):
        return None
    router = layer_names(source.spec).router

    def hook(linear: str, x: Tensor) -> None:
        if linear == router:
            return
        if quant.method == "int8":
            scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            x.copy_((x / scales).round() * scales)
        else:
            rows = quantize_rows_fp8_reference(x)
            x.copy_(rows.values.float() * rows.scales)

    return hook
