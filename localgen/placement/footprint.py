"""What a model takes of memory: for placement, for the choice of a quantization, for plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localgen.backends.formats.architecture.model_shape import (
    ELEMENT_BYTES,
    ModelShape,
    token_bytes,
)
from localgen.backends.memory import load_defaults
from localgen.backends.memory.compute_buffers import (
    cuda_work_bytes,
    llamacpp_fixed_bytes,
    llamacpp_work_token_bytes,
)
from localgen.backends.memory.load_defaults import Defaults
from localgen.backends.model_info import LoadOptions

# a context with room for a long document or an hour of talk
USEFUL_TOKENS = 8192
# of a model whose shape is not known: buffers of the computation, and an allowance for the KV cache
_WORK_SHARE = 0.05
_KV_SHARE = 1 / 8
_KV_LEAST_BYTES = 64 << 20
# most GGUF files have four bits and a little a weight: in sixteen they are four times as large
_GGUF_WIDENED = 4

Runner = Literal["llamacpp", "cuda", "cuda on cpu"]
_DEFAULTS: dict[Runner, Defaults] = {
    "llamacpp": load_defaults.LLAMACPP,
    "cuda": load_defaults.CUDA,
    "cuda on cpu": load_defaults.CUDA_ON_CPU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a model: what does not grow, and for each token of its pool.

    cache_types: of keys and of values. shape: None: not known, its figures are allowances.
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
    def least_bytes(self) -> int:
        """All of it but a pool whose size is to be settled."""
        fixed = self.weights_bytes + self.fixed_bytes
        if self.shape is None:
            fixed += max(int(self.weights_bytes * _KV_SHARE), _KV_LEAST_BYTES)
        return fixed

    def bytes_with(self, tokens: int) -> int:
        """All of it with a pool of so many tokens."""
        return self.least_bytes + int(self.token_bytes * tokens)

    def need_bytes(self, tokens: int | None = None) -> int:
        """All of it with a pool of so many tokens, at most the model's own; None: a useful one."""
        if self.shape is None:
            return self.least_bytes
        useful = useful_tokens(self.shape)
        # more than it was trained for, or nothing at all, is for the engine to refuse
        wanted = useful if tokens is None else min(max(0, tokens), self.shape.ctx_train or tokens)
        return self.bytes_with(wanted)


def useful_tokens(shape: ModelShape | None) -> int:
    """The context that a model must have room for."""
    trained = shape.ctx_train if shape else 0
    return min(USEFUL_TOKENS, trained or USEFUL_TOKENS)


def kept_bytes(size_bytes: int, params: int | None, runner: Runner, *, is_gguf: bool) -> int:
    """Bytes of weights as a runner keeps them: llama.cpp as the file has them, our own engine a
    GGUF file's in 16 bits and all in 32 on a CPU. A guess where params is not known."""
    if runner == "llamacpp" or (runner == "cuda" and not is_gguf):
        return size_bytes
    if not is_gguf:
        return 2 * size_bytes
    wide = 2 * params if params else size_bytes * _GGUF_WIDENED
    return wide if runner == "cuda" else 2 * wide


def footprint(
    weights_bytes: int,
    shape: ModelShape | None,
    runner: Runner = "llamacpp",
    options: LoadOptions = LoadOptions(),
) -> Footprint:
    """What a model of these weights takes on a runner. weights_bytes: as the runner keeps them."""
    usual = _DEFAULTS[runner]
    types = tuple(
        asked if asked in ELEMENT_BYTES else usual.cache_type  # the engine refuses others
        for asked in (options.cache_type_k, options.cache_type_v)
    )
    if shape is None:
        return Footprint(
            weights_bytes=weights_bytes,
            fixed_bytes=int(weights_bytes * _WORK_SHARE),
            kv_token_bytes=0.0,
            work_token_bytes=0.0,
            cache_types=types,
            shape=None,
        )
    fixed, per_token = _work(shape, runner, usual, options)
    return Footprint(
        weights_bytes=weights_bytes,
        fixed_bytes=fixed,
        kv_token_bytes=token_bytes(shape.caches, types[0], types[1]),
        work_token_bytes=per_token,
        cache_types=types,
        shape=shape,
    )


def parts(options: LoadOptions) -> int:
    """Into how many equal ones llama.cpp's pool is cut."""
    return 1 if options.kv_unified is not False else options.parallel or load_defaults.PARTS


def _work(
    shape: ModelShape, runner: Runner, usual: Defaults, options: LoadOptions
) -> tuple[int, float]:
    """Bytes of the computation's buffers: fixed, and for each token of the pool."""
    step_tokens = options.max_batch_tokens or usual.max_batch_tokens
    if runner != "llamacpp":
        bytes_ = cuda_work_bytes(
            shape,
            step_tokens=step_tokens,
            sequences=options.parallel or usual.parallel,
            element_bytes=usual.element_bytes or 2,
        )
        return bytes_, 0.0
    in_parts = options.kv_unified is False
    sequences = parts(options) if in_parts else (options.parallel or usual.parallel) + usual.donors
    fixed = llamacpp_fixed_bytes(shape, step_tokens=step_tokens, sequences=sequences)
    flash_attn = options.flash_attn != "off"
    return fixed, llamacpp_work_token_bytes(shape, step_tokens=step_tokens, flash_attn=flash_attn)
