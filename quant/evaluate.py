"""What rounding has cost: perplexity on held-out text, and how far the next token's distribution
moved, a layer at a time and a part of the vocabulary at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.gemm.fp8 import small_rows
from localgen.backends.formats.hf.tensor_names import names_of
from localgen.quant.calibrate.layer_forward import LayerForward, Tap, embed, logits
from localgen.quant.files.layerwise_checkpoint import Source

# tokens of one pass through a layer, and of one product with the head; outputs of such a product
_BATCH_TOKENS = 2048
_HEAD_TOKENS = 512
_HEAD_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Loss:
    """perplexity: exp of the mean negative log likelihood of each token but a window's first.

    kl: mean Kullback-Leibler divergence of the next token's distribution from the original's, in
    nats; None: of the original itself, or of a model with other tokens.
    """

    perplexity: float
    kl: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A model after its last layer. hidden: float32 [windows, length, hidden] for `ids`."""

    source: Source
    ids: Tensor
    hidden: Tensor


@torch.no_grad()
def read(
    source: Source,
    ids: Tensor,
    device: torch.device | str = "cpu",
    on_layer: Callable[[int], None] = lambda done: None,
) -> Read:
    """Run windows through a model that is never whole in memory. ids: int64 [windows, length].

    on_layer: layers done so far.
    """
    spec, length = source.spec, ids.shape[1]
    forward = LayerForward(spec, length, device)
    rows, places = torch.unique(ids, return_inverse=True)
    weight = source.picked_rows("model.embed_tokens.weight", rows)
    hidden = embed(spec, weight, places)
    tap = _rounding(source)
    each = max(1, _BATCH_TOKENS // length)
    for index in range(spec.layers):
        tensors = source.layer(index, device)
        for part in torch.split(hidden, each):
            part.copy_(forward.run(index, tensors, part.to(device), tap))
        on_layer(index + 1)
    return Read(source, ids, hidden)


@torch.no_grad()
def losses(models: Sequence[Read], device: torch.device | str = "cpu") -> list[Loss]:
    """Of each model; the first is what the others are compared with, where they read the same
    tokens."""
    first = models[0]
    together = [first, *(one for one in models[1:] if _same_tokens(one, first))]
    found = {id(one): loss for one, loss in zip(together, _compared(together, device), strict=True)}
    for one in models:
        if id(one) not in found:
            found[id(one)] = _compared([one], device)[0]
    return [found[id(one)] for one in models]


@torch.no_grad()
def window_logits(model: Read, index: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [length, vocab] of one window."""
    head = _Head(model, device)
    hidden = model.hidden[index].to(device)
    parts = [head.logits(part, hidden).cpu() for part in head.parts()]
    return torch.cat(parts, -1)


class Sums:
    """What the losses of some tokens follow from, gathered over parts of the vocabulary.

    tokens: how many. The logits of a part are float32 [tokens of a block, outputs].
    """

    def __init__(self, tokens: int) -> None:
        self._most = torch.full((tokens,), -math.inf, dtype=torch.float64)
        self._sum = torch.zeros(tokens, dtype=torch.float64)
        self._target = torch.zeros(tokens, dtype=torch.float64)
        self._moved = torch.zeros(tokens, dtype=torch.float64)

    def add(
        self, block: slice, first: int, own: Tensor, targets: Tensor, original: Tensor | None = None
    ) -> None:
        """own: outputs from `first` on, for the block's tokens, whose next ones are `targets`.

        original: what another model gives in their place; these sums are then of it, and of how
        far `own` is from it.
        """
        leading = own if original is None else original
        most = torch.maximum(self._most[block], leading.amax(-1).double().cpu())
        shrink = (self._most[block] - most).exp()
        shares = (leading - most.to(leading.device).float()[:, None]).exp()
        self._most[block] = most
        self._sum[block] = self._sum[block] * shrink + _total(shares)
        if original is not None:
            self._moved[block] = self._moved[block] * shrink + _total(shares * (original - own))
        within = (targets >= first) & (targets < first + own.shape[1])
        rows = within.nonzero().flatten()
        found = leading[rows.to(own.device), (targets[rows] - first).to(own.device)]
        self._target[block.start + rows] = found.double().cpu()

    @property
    def log_sum(self) -> Tensor:
        """float64 [tokens]: log of the sum of exponentials over the whole vocabulary."""
        return self._most + self._sum.log()

    @property
    def perplexity(self) -> float:
        return math.exp(float((self.log_sum - self._target).mean()))

    def divergence(self, own: Sums) -> float:
        """Mean of KL(original || own); these sums are of the original beside that model."""
        moved = self._moved / self._sum
        return float((moved - self.log_sum + own.log_sum).mean())


def _compared(models: Sequence[Read], device: torch.device | str) -> list[Loss]:
    """The first is the original of the others."""
    ids = models[0].ids
    targets = ids[:, 1:].flatten()
    states = [one.hidden[:, :-1].flatten(0, 1) for one in models]
    heads = [_Head(one, device) for one in models]
    own = [Sums(len(targets)) for _ in models]
    beside = [Sums(len(targets)) for _ in models]
    for part in heads[0].parts():
        weights = [head.rows(part) for head in heads]
        for start in range(0, len(targets), _HEAD_TOKENS):
            block = slice(start, min(start + _HEAD_TOKENS, len(targets)))
            found = [
                head.of_rows(weight, hidden[block].to(device))
                for head, weight, hidden in zip(heads, weights, states, strict=True)
            ]
            for index, values in enumerate(found):
                own[index].add(block, part.start, values, targets[block])
                if index:
                    beside[index].add(block, part.start, values, targets[block], found[0])
    kls = [None, *(beside[i].divergence(own[i]) for i in range(1, len(models)))]
    return [Loss(sums.perplexity, kl) for sums, kl in zip(own, kls, strict=True)]


class _Head:
    """The last norm and the head of a model, a part of the vocabulary at a time."""

    def __init__(self, model: Read, device: torch.device | str) -> None:
        self._source, self._device = model.source, device
        tied = model.source.spec.tied
        self._name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self._norm = model.source.read("model.norm.weight").to(device).float()

    def parts(self) -> list[slice]:
        vocab = self._source.spec.vocab
        return [slice(at, min(at + _HEAD_ROWS, vocab)) for at in range(0, vocab, _HEAD_ROWS)]

    def rows(self, part: slice) -> Tensor:
        return self._source.rows(self._name, part.start, part.stop).to(self._device).float()

    def of_rows(self, weight: Tensor, hidden: Tensor) -> Tensor:
        return logits(self._source.spec, self._norm, weight, hidden)

    def logits(self, part: slice, hidden: Tensor) -> Tensor:
        return self.of_rows(self.rows(part), hidden)


def _same_tokens(one: Read, other: Read) -> bool:
    vocabs = one.source.spec.vocab == other.source.spec.vocab
    return vocabs and torch.equal(one.ids, other.ids)


def _total(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.float64).cpu()


def _rounding(source: Source) -> Tap | None:
    """Rounds the inputs of quantized linears in place, for each token, where the format says that
    whoever runs the model does."""
    quant = source.spec.quant
    if quant is None or quant.method not in ("int8", "fp8"):
        return None
    router = names_of(source.spec).router

    def tap(linear: str, x: Tensor) -> None:
        if linear == router:
            return
        if quant.method == "int8":
            scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            x.copy_((x / scales).round() * scales)
        else:
            small, scales = small_rows(x)
            x.copy_(small.float() * scales)

    return tap
