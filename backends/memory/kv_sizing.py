"""How large a context and a KV pool fit: the same arithmetic for both runners and for plans."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, OutOfMemory

# models with a short context get a pool for several sessions, up to this
USUAL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """How a runner makes pools.

    step_tokens: pools are multiples of it. share: of the free memory, for a pool by default.
    usual_tokens: a default pool is no larger, unless the context is; None: as much as the share.
    parts: of how many equal ones it is made. place: whose memory it is, as errors say.
    smaller: what takes less room, as errors say.
    """

    step_tokens: int
    share: float
    usual_tokens: int | None = USUAL_TOKENS
    parts: int = 1
    place: str = ""
    smaller: str


# a GPU is there to be filled, main memory belongs to other programs, too
LLAMACPP = PoolRules(step_tokens=256, share=0.5, smaller="a smaller --cache-type-k and -v")
CUDA = PoolRules(step_tokens=16, share=0.9, usual_tokens=None, smaller="-ctk int8 -ctv int8")
CUDA_ON_CPU = PoolRules(step_tokens=16, share=0.5, place=" on cpu", smaller=CUDA.smaller)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for; None: the largest. trained: the model's own context. name: of the model,
    as errors say."""

    ctx: int | None
    kv_tokens: int | None
    trained: int
    name: str = "the model"


@dataclass(frozen=True, slots=True)
class Size:
    """ctx: longest sequence. kv_tokens: the pool, a multiple of the rules' step."""

    ctx: int
    kv_tokens: int
    notes: tuple[str, ...] = ()


def choose(wanted: Wanted, rules: PoolRules, *, token_bytes: float, free_bytes: int) -> Size:
    """The context and pool asked for, or the largest that fit.

    token_bytes: of one token. free_bytes: left beside the weights and what computing takes.
    InvalidRequest, OutOfMemory: with both numbers.
    """
    trained, parts, step = wanted.trained, rules.parts, rules.step_tokens
    if wanted.ctx is not None and not 0 < wanted.ctx <= trained:
        raise InvalidRequest(
            f"--ctx {wanted.ctx:,}: {wanted.name} was trained for {trained:,} tokens, "
            f"ask for 1 to {trained:,}",
            param="ctx",
        )
    most = largest(token_bytes, max(0, free_bytes), trained * parts) // parts
    fitting = largest(token_bytes, max(0, free_bytes) * rules.share, _ENDLESS) // parts
    fitting = fitting // step * step
    asked = None if wanted.kv_tokens is None else wanted.kv_tokens // parts
    ctx = wanted.ctx or max(step, min(trained, fitting if asked is None else asked))
    ctx = min(ctx, trained)
    part = _part(ctx, fitting, rules) if asked is None else asked
    if part < ctx:
        held = f"{wanted.kv_tokens:,} tokens" + f" in {parts} parts" * (parts > 1)
        raise InvalidRequest(
            f"a pool of {held} is smaller than the context of {ctx:,}: "
            f"ask for at least --kv-tokens {parts * ctx:,}, or a smaller --ctx",
            param="kv_tokens",
        )
    kv_tokens = parts * -(-part // step) * step
    if kv_tokens * token_bytes > max(0, free_bytes):
        raise OutOfMemory(_too_large(kv_tokens, token_bytes, free_bytes, most, rules))
    return Size(ctx, kv_tokens, _notes(wanted, ctx, free_bytes, rules))


_ENDLESS = 1 << 62


def largest(token_bytes: float, room_bytes: float, most: int) -> int:
    """Tokens that fit a room; at most `most`, which it is where tokens take nothing."""
    return min(most, int(room_bytes / token_bytes)) if token_bytes else most


def _part(ctx: int, fitting: int, rules: PoolRules) -> int:
    """Tokens of each part by default."""
    if rules.parts > 1:
        return ctx
    if rules.usual_tokens is None:
        return max(ctx, fitting)
    return max(ctx, min(fitting, rules.usual_tokens))


def _too_large(
    kv_tokens: int, token_bytes: float, free_bytes: int, most: int, rules: PoolRules
) -> str:
    fewer = f", or fewer than {rules.parts} --parallel" * (rules.parts > 1)
    most = most // rules.step_tokens * rules.step_tokens
    way_out = f"ask for at most --ctx {most:,}, or {rules.smaller}{fewer}"
    if not most:
        way_out = "take a smaller quantization or model, or free memory"
    return (
        f"a KV pool of {kv_tokens:,} tokens needs {kv_tokens * token_bytes / 1e9:.1f} GB, "
        f"{max(0, free_bytes) / 1e9:.1f} GB are free{rules.place} beside the weights: "
        f"{way_out}"
    )


def _notes(wanted: Wanted, ctx: int, free_bytes: int, rules: PoolRules) -> tuple[str, ...]:
    if wanted.ctx is not None or wanted.kv_tokens is not None or ctx >= wanted.trained:
        return ()
    if rules.place:
        return (f"context {ctx:,} of {wanted.trained:,}: what fits{rules.place}",)
    return (
        f"context {ctx:,} of {wanted.trained:,}: its KV cache takes half of the "
        f"{free_bytes / 1e9:.1f} GB that are free; --ctx sets another",
    )
