"""Choose the context length and the KV cache size, for both runners and for `plan`."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.units import format_size

# models with a short context get a KV cache for several sequences, up to this size
DEFAULT_POOL_TOKENS = 16_384
# the context in main memory if none is requested: that of long models would take most of it
DEFAULT_CTX = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolRules:
    """How a runner sizes its KV cache.

    granularity_tokens: the size is rounded up to a multiple of this.
    memory_fraction: fraction of the free memory that a default-sized KV cache may use.
    default_max_tokens: upper limit of the default size unless the context is larger, or None if
    only memory_fraction limits it.
    default_ctx: context length if none is requested, or None for the largest that fits.
    num_parts: number of equal parts that the KV cache is split into.
    memory_location: suffix for error messages, e.g. ` on cuda:0`.
    reduce_hint: how to reduce memory usage, for error messages.
    """

    granularity_tokens: int
    memory_fraction: float
    default_max_tokens: int | None = DEFAULT_POOL_TOKENS
    default_ctx: int | None = DEFAULT_CTX
    num_parts: int = 1
    memory_location: str = ""
    reduce_hint: str


# main memory is shared with other programs, a GPU usually is not
LLAMACPP_POOL = KVPoolRules(
    granularity_tokens=256, memory_fraction=0.5, reduce_hint="smaller --cache-type-k and -v"
)
CUDA_POOL = KVPoolRules(
    granularity_tokens=16,
    memory_fraction=0.9,
    default_max_tokens=None,
    default_ctx=None,
    reduce_hint="-ctk int8 -ctv int8",
)
CUDA_ON_CPU_POOL = KVPoolRules(
    granularity_tokens=16,
    memory_fraction=0.5,
    memory_location=" on cpu",
    reduce_hint=CUDA_POOL.reduce_hint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizeRequest:
    """Requested sizes, or None for the largest that fits.

    ctx_train: the context length that the model was trained for.
    model_name: for error messages.
    """

    ctx: int | None
    kv_tokens: int | None
    ctx_train: int
    model_name: str = "the model"


@dataclass(frozen=True, slots=True)
class KVSize:
    """ctx: context length. kv_tokens: size of the KV cache, a multiple of granularity_tokens."""

    ctx: int
    kv_tokens: int
    notes: tuple[str, ...] = ()


def resolve_kv_size(
    request: KVSizeRequest, rules: KVPoolRules, *, token_bytes: float, free_bytes: int
) -> KVSize:
    """Return the requested context length and KV cache size, or the largest that fit.

    token_bytes: KV cache bytes per token.
    free_bytes: memory left after weights and compute buffers.

    Raises InvalidRequest if the request is contradictory and OutOfMemory if it does not fit; the
    messages state both numbers.
    """
    trained, parts, step = request.ctx_train, rules.num_parts, rules.granularity_tokens
    require_trained_ctx(request.ctx, trained, request.model_name)
    max_tokens = max_fitting_tokens(token_bytes, max(0, free_bytes), trained * parts) // parts
    fitting = (
        max_fitting_tokens(token_bytes, max(0, free_bytes) * rules.memory_fraction, _UNBOUNDED)
        // parts
    )
    fitting = fitting // step * step
    requested = None if request.kv_tokens is None else request.kv_tokens // parts
    default = max(step, min(fitting, rules.default_ctx or fitting))
    ctx = min(trained, request.ctx or max(step, default if requested is None else requested))
    part = _default_part_tokens(ctx, fitting, rules) if requested is None else requested
    if part < ctx:
        pool_text = f"{request.kv_tokens:,} tokens" + f" in {parts} parts" * (parts > 1)
        raise InvalidRequest(
            f"a KV cache of {pool_text} is too small for the context of {ctx:,}: "
            f"use --kv-tokens {parts * ctx:,} or more, or a smaller --ctx",
            param="kv_tokens",
        )
    kv_tokens = parts * -(-part // step) * step
    if kv_tokens * token_bytes > max(0, free_bytes):
        raise OutOfMemory(
            _out_of_memory_message(kv_tokens, token_bytes, free_bytes, max_tokens, rules)
        )
    return KVSize(ctx, kv_tokens, _notes(request, ctx, free_bytes, rules))


def require_trained_ctx(ctx: int | None, ctx_train: int, model_name: str) -> None:
    """Raises InvalidRequest if a context length is more than the model was trained for."""
    if ctx is not None and not 0 < ctx <= ctx_train:
        raise InvalidRequest(
            f"--ctx {ctx:,}: {model_name} was trained for {ctx_train:,} tokens, "
            f"use 1 to {ctx_train:,}",
            param="ctx",
        )


_UNBOUNDED = 1 << 62


def max_fitting_tokens(token_bytes: float, free_bytes: float, limit: int) -> int:
    """Number of tokens that fit in `free_bytes`, at most `limit`.

    Returns `limit` if a token takes no memory.
    """
    return min(limit, int(free_bytes / token_bytes)) if token_bytes else limit


def _default_part_tokens(ctx: int, fitting_tokens: int, rules: KVPoolRules) -> int:
    """Default size of each part in tokens."""
    if rules.num_parts > 1:
        return ctx
    if rules.default_max_tokens is None:
        return max(ctx, fitting_tokens)
    return max(ctx, min(fitting_tokens, rules.default_max_tokens))


def _out_of_memory_message(
    kv_tokens: int, token_bytes: float, free_bytes: int, max_tokens: int, rules: KVPoolRules
) -> str:
    fewer = f", or fewer than {rules.num_parts} parts (--parallel)" * (rules.num_parts > 1)
    max_tokens = max_tokens // rules.granularity_tokens * rules.granularity_tokens
    way_out = f"use at most --ctx {max_tokens:,}, or {rules.reduce_hint}{fewer}"
    if not max_tokens:
        way_out = "use a smaller quantization or model, or free memory"
    return (
        f"a KV cache of {kv_tokens:,} tokens needs {format_size(kv_tokens * token_bytes)}, "
        f"{format_size(max(0, free_bytes))} are free{rules.memory_location} after the weights: "
        f"{way_out}"
    )


def _notes(
    request: KVSizeRequest, ctx: int, free_bytes: int, rules: KVPoolRules
) -> tuple[str, ...]:
    if request.ctx is not None or request.kv_tokens is not None or ctx >= request.ctx_train:
        return ()
    if ctx == rules.default_ctx:
        return (f"context {ctx:,} of {request.ctx_train:,}; change it with --ctx or /set ctx",)
    if rules.memory_location:
        return (
            f"context {ctx:,} of {request.ctx_train:,}: the most that fits{rules.memory_location}",
        )
    return (
        f"context {ctx:,} of {request.ctx_train:,}: its KV cache takes half of the "
        f"{format_size(free_bytes)} of free memory; change it with --ctx",
    )
