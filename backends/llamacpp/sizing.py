"""How large a context and a pool this machine can give a model."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.llamacpp.native import CACHE_TYPE_BYTES, Model
from localgen.backends.llamacpp.options import Settings

# share of the memory that is free once the weights are in, for the KV pool by default
DEFAULT_KV_SHARE = 0.5
# models with a short context get a pool for several sessions, up to this
DEFAULT_POOL_TOKENS = 16_384
# llama.cpp rounds pools up to this
POOL_STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Size:
    """ctx: longest sequence. kv_tokens: the pool, a multiple of POOL_STEP_TOKENS.

    Where it is not unified, it has a part for each of `parallel` sequences.
    """

    ctx: int
    kv_tokens: int
    notes: tuple[str, ...]


def kv_bytes_per_token(model: Model, options: Settings) -> float:
    """Bytes that one token takes in the KV cache, over all layers (an upper bound: metadata
    that differs by layer counts as if every layer had the most heads)."""
    heads = max(1, model.kv_heads)
    key, value = model.head_sizes
    per_layer = heads * (
        key * CACHE_TYPE_BYTES[options.cache_type_k]
        + value * CACHE_TYPE_BYTES[options.cache_type_v]
    )
    return model.layers * per_layer


def choose(model: Model, options: Settings, *, free_bytes: int) -> Size:
    """The context and pool asked for, or the largest that fit.

    free_bytes: memory left beside the weights. InvalidRequest, OutOfMemory: with both numbers.
    """
    trained = model.ctx_train
    if options.ctx is not None and not 0 < options.ctx <= trained:
        raise InvalidRequest(
            f"--ctx {options.ctx:,}: {model.path.name} was trained for {trained:,} tokens, "
            f"ask for 1 to {trained:,}",
            param="ctx",
        )
    per_token = kv_bytes_per_token(model, options)
    parts = 1 if options.kv_unified else options.parallel
    fitting = int(free_bytes * DEFAULT_KV_SHARE / per_token) // parts
    asked = options.kv_tokens and options.kv_tokens // parts
    ctx = options.ctx or max(POOL_STEP_TOKENS, min(trained, fitting, asked or trained))
    least = max(ctx, min(fitting, DEFAULT_POOL_TOKENS)) if options.kv_unified else ctx
    part = least if asked is None else asked
    if part < ctx:
        held = f"{options.kv_tokens:,} tokens" + f" in {parts} parts" * (parts > 1)
        raise InvalidRequest(
            f"a pool of {held} is smaller than the context of {ctx:,}: "
            f"ask for at least --kv-tokens {parts * ctx:,}, or a smaller --ctx",
            param="kv_tokens",
        )
    kv_tokens = parts * -(-part // POOL_STEP_TOKENS) * POOL_STEP_TOKENS
    if kv_tokens * per_token > free_bytes:
        most = int(free_bytes / per_token) // parts
        raise OutOfMemory(
            f"a KV pool of {kv_tokens:,} tokens needs {kv_tokens * per_token / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} GB are free beside the weights: "
            f"ask for at most --ctx {most:,}, or a smaller --cache-type-k and -v"
            + f", or fewer than {parts} --parallel"
            * (parts > 1)
        )
    notes: tuple[str, ...] = ()
    if options.ctx is None and options.kv_tokens is None and ctx < trained:
        notes = (
            f"context {ctx:,} of {trained:,}: its KV cache takes half of the "
            f"{free_bytes / 1e9:.1f} GB that are free; --ctx sets another",
        )
    return Size(ctx, kv_tokens, notes)
