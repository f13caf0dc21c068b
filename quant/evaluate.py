"""What rounding has cost: perplexity on held-out text, and how far the next token's distribution
moved, a layer at a time and a part of the vocabulary at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.gemm.fp8 import quantize_rows_fp8
from localgen.backends.formats.hf.tensor_names import layer_names
from localgen.quant.calibrate.layer_forward import (
    InputHook,
    LayerForward,
    compute_logits,
    embed_tokens,
)
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint

# tokens of one pass through a layer, and of one product with the head; outputs of such a product
_BATCH_TOKENS = 2048
_HEAD_TOKENS = 512
_HEAD_ROWS = 8192


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """perplexity: exp of the mean negative log likelihood of each token but a window's first.

    kl: mean Kullback-Leibler divergence of the next token's distribution from the original's, in
    nats; None: of the original itself, or of a model with other tokens.
    """

    perplexity: float
    kl: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FinalStates:
    """A model after its last layer. hidden: float32 [windows, length, hidden] for `ids`."""

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
    """Run windows through a model that is never whole in memory. ids: int64 [windows, length].

    on_layer: layers done so far.
    """
    spec, length = source.spec, ids.shape[1]
    forward = LayerForward(spec, length, device)
    rows, places = torch.unique(ids, return_inverse=True)
    weight = source.gather_rows("model.embed_tokens.weight", rows)
    hidden = embed_tokens(spec, weight, places)
    tap = _activation_rounding_hook(source)
    each = max(1, _BATCH_TOKENS // length)
    for index in range(spec.num_layers):
        tensors = source.read_layer(index, device)
        for part in torch.split(hidden, each):
            part.copy_(forward.run(index, tensors, part.to(device), tap))
        on_layer(index + 1)
    return FinalStates(source, ids, hidden)


@torch.no_grad()
def compute_metrics(
    models: Sequence[FinalStates], device: torch.device | str = "cpu"
) -> list[EvalMetrics]:
    """Of each model; the first is what the others are compared with, where they read the same
    tokens."""
    first = models[0]
    together = [first, *(one for one in models[1:] if _same_tokens(one, first))]
    found = {
        id(one): loss
        for one, loss in zip(together, _compare_with_first(together, device), strict=True)
    }
    for one in models:
        if id(one) not in found:
            found[id(one)] = _compare_with_first([one], device)[0]
    return [found[id(one)] for one in models]


@torch.no_grad()
def window_logits(model: FinalStates, index: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [length, vocab] of one window."""
    head = _LmHead(model, device)
    hidden = model.hidden[index].to(device)
    parts = [head.logits(part, hidden).cpu() for part in head.vocab_slices()]
    return torch.cat(parts, -1)


class LossAccumulator:
    """What the losses of some tokens follow from, gathered over parts of the vocabulary.

    tokens: how many. The logits of a part are float32 [tokens of a block, outputs].
    """

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
        """model_logits: outputs from `first` on, for the block's tokens, whose next ones are
        `targets`.

        reference_logits: what another model gives in their place; these sums are then of it, and of
        how far `own` is from it.
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
        found = leading[
            rows.to(model_logits.device), (targets[rows] - vocab_start).to(model_logits.device)
        ]
        self._target[block.start + rows] = found.double().cpu()

    @property
    def log_sum(self) -> Tensor:
        """float64 [tokens]: log of the sum of exponentials over the whole vocabulary."""
        return self._max + self._sum.log()

    @property
    def perplexity(self) -> float:
        return math.exp(float((self.log_sum - self._target).mean()))

    def kl_divergence(self, model: LossAccumulator) -> float:
        """Mean of KL(original || own); these sums are of the original beside that model."""
        moved = self._weighted_logit_difference / self._sum
        return float((moved - self.log_sum + model.log_sum).mean())


def _compare_with_first(
    models: Sequence[FinalStates], device: torch.device | str
) -> list[EvalMetrics]:
    """The first is the original of the others."""
    ids = models[0].ids
    targets = ids[:, 1:].flatten()
    states = [one.hidden[:, :-1].flatten(0, 1) for one in models]
    heads = [_LmHead(one, device) for one in models]
    own = [LossAccumulator(len(targets)) for _ in models]
    beside = [LossAccumulator(len(targets)) for _ in models]
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
                    beside[index].add(block, part.start, values, targets[block], found[0])
    kls = [None, *(beside[i].kl_divergence(own[i]) for i in range(1, len(models)))]
    return [EvalMetrics(sums.perplexity, kl) for sums, kl in zip(own, kls, strict=True)]


class _LmHead:
    """The last norm and the head of a model, a part of the vocabulary at a time."""

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


def _sum_exactly(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.float64).cpu()


def _activation_rounding_hook(source: LayerwiseCheckpoint) -> InputHook | None:
    """Rounds the inputs of quantized linears in place, for each token, where the format says that
    whoever runs the model does."""
    quant = source.spec.quant
    if quant is None or quant.method not in ("int8", "fp8"):
        return None
    router = layer_names(source.spec).router

    def tap(linear: str, x: Tensor) -> None:
        if linear == router:
            return
        if quant.method == "int8":
            scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            x.copy_((x / scales).round() * scales)
        else:
            small, scales = quantize_rows_fp8(x)
            x.copy_(small.float() * scales)

    return tap
