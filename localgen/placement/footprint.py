"""Estimate the memory footprint of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localgen.backends.formats.architecture.model_shape import (
    CACHE_ELEMENT_BYTES,
    ModelShape,
    kv_cache_bytes_per_token,
)
from localgen.backends.memory import load_defaults
from localgen.backends.memory.compute_buffers import (
    cuda_work_bytes,
    llamacpp_fixed_bytes,
    llamacpp_work_bytes_per_token,
)
from localgen.backends.memory.load_defaults import LoadDefaults
from localgen.backends.model_info import LoadOptions
from localgen.backends.types import MAX_DRAFT_TOKENS

# enough for a long document or an hour of conversation
USEFUL_CTX = 8192
# for a model of unknown shape: compute buffers and KV cache as fractions of the weights
_WORK_FRACTION = 0.05
_KV_FRACTION = 1 / 8
_MIN_KV_BYTES = 64 << 20
# most GGUF files have slightly over four bits per weight: 16 bits take four times as much
_GGUF_DEQUANTIZED_RATIO = 4

RunnerKind = Literal["llamacpp", "cuda", "cuda on cpu"]
_DEFAULTS: dict[RunnerKind, LoadDefaults] = {
    "llamacpp": load_defaults.LLAMACPP_DEFAULTS,
    "cuda": load_defaults.CUDA_DEFAULTS,
    "cuda on cpu": load_defaults.CUDA_ON_CPU_DEFAULTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a model in bytes: a fixed part and a part per token of the KV pool.

    cache_types: of keys and values. shape: None if unknown; the figures are then rough.
    """

    weights_bytes: int
    fixed_bytes: int
    kv_token_bytes: float
    work_token_bytes: float
    cache_types: tuple[str, ...]
    shape: ModelShape | None

    @property
    def token_bytes(self) -> float:
        return self.kv_token_bytes + self.work_token_bytes

    @property
    def min_bytes(self) -> int:
        """Memory without the KV pool; with an allowance for it if the shape is unknown."""
        fixed = self.weights_bytes + self.fixed_bytes
        if self.shape is None:
            fixed += max(int(self.weights_bytes * _KV_FRACTION), _MIN_KV_BYTES)
        return fixed

    def total_bytes(self, tokens: int) -> int:
        """Total memory with a KV pool of that many tokens."""
        return self.min_bytes + int(self.token_bytes * tokens)

    def need_bytes(self, tokens: int | None = None) -> int:
        """Total memory with a KV pool of that many tokens, at most ctx_train.

        None: tokens of a useful context.
        """
        if self.shape is None:
            return self.min_bytes
        useful = useful_ctx(self.shape)
        # the engine rejects a context that is longer than ctx_train or not positive
        wanted = useful if tokens is None else min(max(0, tokens), self.shape.ctx_train or tokens)
        return self.total_bytes(wanted)


def useful_ctx(shape: ModelShape | None) -> int:
    """The context length that a model should at least have room for."""
    trained = shape.ctx_train if shape else 0
    return min(USEFUL_CTX, trained or USEFUL_CTX)


def loaded_weight_bytes(
    size_bytes: int, params: int | None, runner: RunnerKind, *, is_gguf: bool
) -> int:
    """Bytes of the weights in a runner's memory; an estimate if params is unknown.

    llama.cpp keeps the file's format. The cuda backend dequantizes GGUF weights to 16 bits, and
    uses 32 bits for all weights on a CPU.
    """
    if runner == "llamacpp" or (runner == "cuda" and not is_gguf):
        return size_bytes
    if not is_gguf:
        return 2 * size_bytes
    wide = 2 * params if params else size_bytes * _GGUF_DEQUANTIZED_RATIO
    return wide if runner == "cuda" else 2 * wide


def estimate_footprint(
    weights_bytes: int,
    shape: ModelShape | None,
    runner: RunnerKind = "llamacpp",
    options: LoadOptions = LoadOptions(),
) -> Footprint:
    """Estimate the footprint. weights_bytes: as loaded (see loaded_weight_bytes)."""
    defaults = _DEFAULTS[runner]
    types = tuple(
        requested
        if requested in CACHE_ELEMENT_BYTES
        else defaults.cache_type  # the engine rejects others
        for requested in (options.cache_type_k, options.cache_type_v)
    )
    if shape is None:
        return Footprint(
            weights_bytes=weights_bytes,
            fixed_bytes=int(weights_bytes * _WORK_FRACTION),
            kv_token_bytes=0.0,
            work_token_bytes=0.0,
            cache_types=types,
            shape=None,
        )
    fixed, per_token = _work_bytes(shape, runner, defaults, options)
    return Footprint(
        weights_bytes=weights_bytes,
        fixed_bytes=fixed,
        kv_token_bytes=kv_cache_bytes_per_token(shape.layer_caches, types[0], types[1]),
        work_token_bytes=per_token,
        cache_types=types,
        shape=shape,
    )


def num_kv_parts(options: LoadOptions) -> int:
    """Number of equal parts of llama.cpp's KV cache."""
    return (
        1
        if options.kv_unified is not False
        else options.parallel or load_defaults.DEFAULT_SPLIT_PARTS
    )


def _work_bytes(
    shape: ModelShape, runner: RunnerKind, runner_defaults: LoadDefaults, options: LoadOptions
) -> tuple[int, float]:
    """Compute buffer bytes: fixed, and per token of the KV pool."""
    step_tokens = options.max_batch_tokens or runner_defaults.max_batch_tokens
    if runner != "llamacpp":
        bytes_ = cuda_work_bytes(
            shape,
            max_batch_tokens=step_tokens,
            num_seqs=options.parallel or runner_defaults.parallel,
            max_drafts=MAX_DRAFT_TOKENS,
            element_bytes=runner_defaults.weight_element_bytes or 2,
            on_gpu=runner == "cuda",
        )
        return bytes_, 0.0
    in_parts = options.kv_unified is False
    sequences = (
        num_kv_parts(options)
        if in_parts
        else (options.parallel or runner_defaults.parallel) + runner_defaults.num_cached_prefixes
    )
    fixed = llamacpp_fixed_bytes(shape, max_batch_tokens=step_tokens, num_seqs=sequences)
    flash_attn = options.flash_attn != "off"
    return fixed, llamacpp_work_bytes_per_token(
        shape, max_batch_tokens=step_tokens, flash_attn=flash_attn
    )
