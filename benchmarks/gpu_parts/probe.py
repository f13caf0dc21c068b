"""A decoder with its own KV cache, run step by step, that returns the logits of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_parts.inputs import doubled
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.batch import Int32Array, StepInputs, build_step_inputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import DecoderWeights, LayerWeights
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as Seq
from localgen.backends.sampling_params import BASE_SAMPLING

Part = TypeVar("Part")


class Probe:
    """Sequences 0 to `sequences` - 1 of at most `max_len` tokens, on shuffled pages."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        *,
        max_len: int,
        sequences: int = 1,
        graphs: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        device, kind = weights.embed.device, dtype or weights.embed.dtype
        self._each = pages_for(max_len)
        count = self._each * sequences
        cache = KVCache.zeros(spec, count, device=device, dtype=kind)
        for layer in cache.layers:
            for tensor in layer.tensors:
                if tensor.dtype.itemsize > 1:  # of an 8-bit cache the scales
                    tensor.fill_(torch.nan)  # detects reads of unwritten slots
        self._pages = np.random.default_rng(0).permutation(count).astype(np.int32)
        self._names = [_sequence(i, max_len) for i in range(sequences)]
        length = min(spec.max_len, self._each * PAGE_TOKENS)
        self._steps = DeviceExecutor(Decoder(spec, weights, length), cache, use_cuda_graphs=graphs)

    def step(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run a step; return the logits [tokens, vocab] of each part (sequence, start, tokens)."""
        logits = self._steps.run(self.inputs(parts))
        return list(torch.split(logits.clone(), [len(tokens) for _, _, tokens in parts]))

    def capture(self) -> None:
        """Capture the CUDA graphs of all steps so far."""
        while self._steps.capture_next():
            pass

    def inputs(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> StepInputs:
        """Return the inputs of a step with these parts."""
        chunks = [
            Chunk(
                seq=self._names[number],
                start=start,
                tokens=list(tokens),
                num_drafts=len(tokens) - 1,
                is_sampled=True,
            )
            for number, start, tokens in parts
        ]
        return build_step_inputs(chunks, self._table)

    def _table(self, seq: Seq) -> Int32Array:
        first = int(seq.id) * self._each
        return self._pages[first : first + self._each]

    def text(self, tokens: Sequence[int], *, rows: int = 1024) -> Tensor:
        """Return the logits after every token of a text, [tokens, vocab]. rows: per step."""
        return torch.cat(
            [
                self.step([(0, start, tokens[start : start + rows])])[0]
                for start in range(0, len(tokens), rows)
            ]
        )


def _sequence(number: int, max_len: int) -> Seq:
    return Seq(
        id=str(number), tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=max_len, max_len=max_len
    )


def exact(weights: DecoderWeights) -> DecoderWeights:
    """Copy weights to the CPU in float64, for the reference implementations."""
    return _changed(weights, lambda tensor: doubled(tensor.cpu()))


def randomize_norms(weights: DecoderWeights, generator: torch.Generator) -> DecoderWeights:
    """Copy with random norm weights, because weights of 1 would hide errors."""

    def other(norm: Tensor | None) -> Tensor | None:
        if norm is None:
            return None
        noise = torch.empty(norm.shape, device=norm.device).normal_(generator=generator)
        return norm + (0.3 * noise).to(norm.dtype)

    def randomized(layer: LayerWeights) -> LayerWeights:
        names = [f.name for f in fields(layer) if "norm" in f.name]
        changed: dict[str, Any] = {name: other(getattr(layer, name)) for name in names}
        return replace(layer, **changed)

    layers = [randomized(layer) for layer in weights.layers]
    norm = other(weights.norm)
    assert norm is not None
    return replace(weights, layers=layers, norm=norm)


def _changed(part: Part, change: Any) -> Part:
    """Apply `change` to all tensors in nested dataclasses, lists and tuples."""
    found: Any = part
    if isinstance(part, Tensor):
        found = change(part)
    elif isinstance(part, (list, tuple)):
        found = type(part)(_changed(item, change) for item in part)
    elif is_dataclass(part) and not isinstance(part, type):
        changed = {f.name: _changed(getattr(part, f.name), change) for f in fields(part) if f.init}
        found = replace(part, **changed)
    return found  # type: ignore[no-any-return]
