"""How large a context and a KV pool fit: the same arithmetic for both runners and for plans."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, OutOfMemory

# models with a short context get a pool for several sessions, up to this
DEFAULT_POOL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolRules:
    """How a runner makes pools.

    granularity_tokens: pools are multiples of it. memory_fraction: of the free memory, for a pool
    by default. default_max_tokens: a default pool is no larger, unless the context is; None: as
    much as the share. num_parts: of how many equal ones it is made. memory_location: whose memory
    it is, as errors say. reduce_hint: what takes less room, as errors say.
    """

    granularity_tokens: int
    memory_fraction: float
    default_max_tokens: int | None = DEFAULT_POOL_TOKENS
    num_parts: int = 1
    memory_location: str = ""
    reduce_hint: str


# a GPU is there to be filled, main memory belongs to other programs, too
LLAMACPP_POOL = KVPoolRules(
    granularity_tokens=256, memory_fraction=0.5, reduce_hint="a smaller --cache-type-k and -v"
)
CUDA_POOL = KVPoolRules(
    granularity_tokens=16,
    memory_fraction=0.9,
    default_max_tokens=None,
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
    """What was asked for; None: the largest. ctx_train: the model's own context. model_name: of the
    model, as errors say."""

    ctx: int | None
    kv_tokens: int | None
    ctx_train: int
    model_name: str = "the model"


@dataclass(frozen=True, slots=True)
class KVSize:
    """ctx: longest sequence. kv_tokens: the pool, a multiple of the rules' step."""

    ctx: int
    kv_tokens: int
    notes: tuple[str, ...] = ()


def resolve_kv_size(
    request: KVSizeRequest, rules: KVPoolRules, *, token_bytes: float, free_bytes: int
) -> KVSize:
    """The context and pool asked for, or the largest that fit.

    token_bytes: of one token. free_bytes: left beside the weights and what computing takes.
    InvalidRequest, OutOfMemory: with both numbers.
    """
    trained, parts, step = request.ctx_train, rules.num_parts, rules.granularity_tokens
    if request.ctx is not None and not 0 < request.ctx <= trained:
        raise InvalidRequest(
            f"--ctx {request.ctx:,}: {request.model_name} was trained for {trained:,} tokens, "
            f"ask for 1 to {trained:,}",
            param="ctx",
        )
    most = max_fitting_tokens(token_bytes, max(0, free_bytes), trained * parts) // parts
    fitting = (
        max_fitting_tokens(token_bytes, max(0, free_bytes) * rules.memory_fraction, _UNBOUNDED)
        // parts
    )
    fitting = fitting // step * step
    asked = None if request.kv_tokens is None else request.kv_tokens // parts
    ctx = request.ctx or max(step, min(trained, fitting if asked is None else asked))
    ctx = min(ctx, trained)
    part = _default_part_tokens(ctx, fitting, rules) if asked is None else asked
    if part < ctx:
        held = f"{request.kv_tokens:,} tokens" + f" in {parts} parts" * (parts > 1)
        raise InvalidRequest(
            f"a pool of {held} is smaller than the context of {ctx:,}: "
            f"ask for at least --kv-tokens {parts * ctx:,}, or a smaller --ctx",
            param="kv_tokens",
        )
    kv_tokens = parts * -(-part // step) * step
    if kv_tokens * token_bytes > max(0, free_bytes):
        raise OutOfMemory(_out_of_memory_message(kv_tokens, token_bytes, free_bytes, most, rules))
    return KVSize(ctx, kv_tokens, _notes(request, ctx, free_bytes, rules))


_UNBOUNDED = 1 << 62


def max_fitting_tokens(token_bytes: float, free_bytes: float, limit: int) -> int:
    """Tokens that fit a room; at most `limit`, which it is where tokens take nothing."""
    return min(limit, int(free_bytes / token_bytes)) if token_bytes else limit


def _default_part_tokens(ctx: int, fitting_tokens: int, rules: KVPoolRules) -> int:
    """Tokens of each part by default."""
    if rules.num_parts > 1:
        return ctx
    if rules.default_max_tokens is None:
        return max(ctx, fitting_tokens)
    return max(ctx, min(fitting_tokens, rules.default_max_tokens))


def _out_of_memory_message(
    kv_tokens: int, token_bytes: float, free_bytes: int, max_tokens: int, rules: KVPoolRules
) -> str:
    fewer = f", or fewer than {rules.num_parts} --parallel" * (rules.num_parts > 1)
    max_tokens = max_tokens // rules.granularity_tokens * rules.granularity_tokens
    way_out = f"ask for at most --ctx {max_tokens:,}, or {rules.reduce_hint}{fewer}"
    if not max_tokens:
        way_out = "take a smaller quantization or model, or free memory"
    return (
        f"a KV pool of {kv_tokens:,} tokens needs {kv_tokens * token_bytes / 1e9:.1f} GB, "
        f"{max(0, free_bytes) / 1e9:.1f} GB are free{rules.memory_location} beside the weights: "
        f"{way_out}"
    )


def _notes(
    request: KVSizeRequest, ctx: int, free_bytes: int, rules: KVPoolRules
) -> tuple[str, ...]:
    if request.ctx is not None or request.kv_tokens is not None or ctx >= request.ctx_train:
        return ()
    if rules.memory_location:
        return (f"context {ctx:,} of {request.ctx_train:,}: what fits{rules.memory_location}",)
    return (
        f"context {ctx:,} of {request.ctx_train:,}: its KV cache takes half of the "
        f"{free_bytes / 1e9:.1f} GB that are free; --ctx sets another",
    )
