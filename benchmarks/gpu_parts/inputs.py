"""Random kernel inputs, never zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV, quantize_kv
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for


@dataclass(frozen=True, slots=True)
class Inputs:
    """Generates random tensors. dtype: of unquantized tensors."""

    generator: torch.Generator
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed values."""
        values = torch.empty(shape, device=self.device, dtype=torch.float32)
        return values.normal_(std=std, generator=self.generator).to(dtype or self.dtype)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Integers from low to high - 1."""
        given = {"generator": self.generator, "device": self.device, "dtype": torch.int64}
        return torch.randint(low, high, shape, **given).to(dtype)  # type: ignore[call-overload, no-any-return]

    def permutation(self, count: int) -> Tensor:
        """0 to count - 1, shuffled."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def cache(self, pages: int, kv_heads: int, size: int, kind: torch.dtype) -> LayerKV:
        """A full KV cache of one layer. kind: its dtype."""
        shape = (pages, kv_heads, PAGE_TOKENS, size)
        keys, values = self.normal(*shape), self.normal(*shape)
        if kind not in QUANTIZED_MAX:
            return LayerKV(keys.to(kind), values.to(kind))
        (k, k_scales), (v, v_scales) = (
            quantize_kv(keys.float(), kind),
            quantize_kv(values.float(), kind),
        )
        return LayerKV(k, v, k_scales, v_scales)

    def ragged(self, rows: list[int], lengths: list[int], pages: int) -> AttentionMetadata:
        """Metadata of sequences with these numbers of new rows and lengths, on shuffled pages."""
        counts = list(map(pages_for, lengths))
        assert sum(counts) <= pages
        own = torch.split(self.permutation(pages)[: sum(counts)], counts)
        tables = torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)
        starts = torch.tensor([0, *rows]).cumsum(0)
        return AttentionMetadata(
            page_tables=tables.to(torch.int32),
            query_starts=starts.to(self.device, torch.int32),
            seq_lens=torch.tensor(lengths, device=self.device, dtype=torch.int32),
            max_query_len=max(rows),
            max_seq_len=max(lengths),
        )


def doubled(x: Tensor) -> Tensor:
    """Convert floats of 16 bits or more to float64; 8-bit values stay unchanged."""
    return x.double() if x.is_floating_point() and x.dtype.itemsize > 1 else x


def doubled_cache(cache: LayerKV) -> LayerKV:
    """Copy a cache, converted to float64 unless it is 8-bit."""
    keys, values, *scales = (doubled(part).clone() for part in cache.tensors)
    return LayerKV(keys, values, *scales)


def exact_cache(cache: LayerKV) -> LayerKV:
    """Return the dequantized values of a cache in float64."""
    keys, values = doubled(cache.keys), doubled(cache.values)
    if cache.key_scales is None or cache.value_scales is None:
        return LayerKV(keys, values)
    return LayerKV(
        cache.keys.double() * cache.key_scales.double()[..., None],
        cache.values.double() * cache.value_scales.double()[..., None],
    )
