"""KL divergence of next-token distributions from the original model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.quant.calibrate.input_stats import reduced_precision_matmul
from localgen.quant.calibrate.layer_forward import compute_logits
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint

_SLICE_ROWS = 8192
_BLOCK_TOKENS = 512
# changes some rows of the output head: float32 [rows, hidden]
HeadChange = Callable[[Tensor], Tensor]


def head_bytes(spec: ModelSpec) -> int:
    """Memory of a comparison: a slice of the output head, changed and not, and logits: of both
    models, their difference and its shares, each with a copy, one of them in float64."""
    rows = min(_SLICE_ROWS, spec.vocab_size)
    return 4 * rows * (3 * spec.hidden_size + 9 * _BLOCK_TOKENS)


class ReferenceDistribution:
    """The original's distributions after each token.

    hidden: output of its last layer, float32 [tokens, hidden]. dtype: that of the layers'
    multiplications; if it is bfloat16, those with the head are rounded too where that is faster.
    """

    def __init__(
        self,
        source: LayerwiseCheckpoint,
        hidden: Tensor,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self._source, self._hidden, self._device = source, hidden, device
        self._spec: ModelSpec = source.spec
        tied = self._spec.tied_embeddings
        self._head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self._is_rounded = dtype is torch.bfloat16
        self._norm = source.read("model.norm.weight").to(device).float()
        self._log_sums = torch.full((len(hidden),), -torch.inf, dtype=torch.float64)
        for weight in self._head_slices():
            for block in self._blocks():
                found = self._logits(hidden, block, weight).logsumexp(-1).double().cpu()
                self._log_sums[block] = torch.logaddexp(self._log_sums[block], found)

    def divergences(
        self, states: Sequence[Tensor], change_head: HeadChange = lambda weight: weight
    ) -> list[float]:
        """Mean KL divergence in nats, of the reference from each of several outputs of the last
        layer, float32 [tokens, hidden]. change_head: applied to their output head."""
        log_sums = [torch.full_like(self._log_sums, -torch.inf) for _ in states]
        moved = [torch.zeros_like(self._log_sums) for _ in states]
        for weight in self._head_slices():
            changed = change_head(weight)
            for block in self._blocks():
                wanted = self._logits(self._hidden, block, weight)
                shares = (wanted - self._log_sums[block, None].to(wanted)).exp()
                for index, hidden in enumerate(states):
                    found = self._logits(hidden, block, changed)
                    sums = found.logsumexp(-1).double().cpu()
                    log_sums[index][block] = torch.logaddexp(log_sums[index][block], sums)
                    apart = (shares * (wanted - found)).sum(-1, dtype=torch.float64)
                    moved[index][block] += apart.cpu()
        return [
            float((apart - self._log_sums + sums).mean())
            for apart, sums in zip(moved, log_sums, strict=True)
        ]

    def _logits(self, hidden: Tensor, block: slice, weight: Tensor) -> Tensor:
        states = hidden[block].to(self._device)
        with reduced_precision_matmul() if self._is_rounded else nullcontext():
            return compute_logits(self._spec, self._norm, weight, states)

    def _head_slices(self) -> Iterator[Tensor]:
        for first in range(0, self._spec.vocab_size, _SLICE_ROWS):
            last = min(first + _SLICE_ROWS, self._spec.vocab_size)
            rows = self._source.read_rows(self._head_name, first, last)
            yield rows.to(self._device).float()

    def _blocks(self) -> Iterator[slice]:
        for first in range(0, len(self._hidden), _BLOCK_TOKENS):
            yield slice(first, min(first + _BLOCK_TOKENS, len(self._hidden)))
