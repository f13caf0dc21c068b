"""Sizes of all tests: FULL for a GPU, with models that fit its memory; QUICK for a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.gpu_parts import case, shapes
from benchmarks.gpu_parts.case import Sizes
from benchmarks.gpu_parts.kernel_speed import ExpertLayer, SequenceBatch
from benchmarks.gpu_parts.shapes import Shape, with_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """Requests submitted at the same time. prompt, answer: tokens of each."""

    requests: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Sizes in tokens, buffers in bytes, times in seconds.

    plain, int4, fp8: a model in three formats. small: their draft model. large, mixture: for the
    parts of these names. call_s: total of a call. alone: a single request. depths: context lengths
    of single requests. batches: batch sizes of part `curve`, with requests like `each`. overload:
    more requests than run at once. mixed_tokens: minimum and maximum of prompts and answers.
    lognormal: mean lengths. prefix: length of the prefix of requests like `with_prefix`. chats:
    number of concurrent chats of `turns` turns. mixture_batches: batch sizes of part `mixture`,
    with requests like `each`. long: length of a long text. beside_long: requests that decode beside
    it. long_turn: turns over it, one at a time. by_cache: requests over a KV cache of 16 and of 8
    bits. steps, profiled_prompt: decode steps and tokens of a prompt that are profiled. peer:
    requests for peers with batching. compiler: backend of torch.compile for peers.
    """

    plain: Shape
    int4: Shape
    fp8: Shape
    small: Shape
    large: Shape
    mixture: Shape
    rounds: int
    call_s: float
    copy_bytes: int
    product_side: int
    checked: Sizes
    product_rows: tuple[int, ...]
    attention_batches: tuple[SequenceBatch, ...]
    experts: ExpertLayer
    expert_rows: tuple[int, ...]
    alone: RequestGroup
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    each: RequestGroup
    overload: RequestGroup
    mixed_requests: int
    mixed_tokens: tuple[int, int]
    lognormal: RequestGroup
    prefix: int
    with_prefix: RequestGroup
    chats: int
    turns: int
    turn: RequestGroup
    mixture_batches: tuple[int, ...]
    long: int
    beside_long: RequestGroup
    long_turn: RequestGroup
    by_cache: RequestGroup
    steps: int
    profiled_prompt: int
    step_batches: tuple[int, ...]
    peer: RequestGroup
    peer_ready_s: float
    compiler: str
    kv_tokens: int

    @property
    def models(self) -> tuple[Shape, ...]:
        """The models of most parts, without duplicates."""
        return tuple(dict.fromkeys((*self.formats, self.small)))

    @property
    def formats(self) -> tuple[Shape, ...]:
        return (self.plain, self.int4, self.fp8)

    @property
    def int8_cache(self) -> Shape:
        """`plain` with an 8-bit KV cache."""
        return replace(self.plain, name=f"{self.plain.name}, int8 cache", int8_cache=True)

    @property
    def checked_shapes(self) -> tuple[Shape, ...]:
        """The models whose modes depend on checks."""
        return (*self.models, self.int8_cache, self.mixture)

    def shape(self, name: str) -> Shape:
        """The model of this name."""
        return next(shape for shape in self.models if shape.name == name)


FULL = GpuPlan(
    plain=shapes.PLAIN_8B,
    int4=shapes.INT4_8B,
    fp8=shapes.FP8_8B,
    small=shapes.PLAIN_1B,
    large=shapes.INT4_70B,
    mixture=shapes.MIXTURE_30B,
    rounds=5,
    call_s=510.0,
    copy_bytes=4 << 30,
    product_side=8192,
    checked=case.FULL,
    product_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    attention_batches=(
        SequenceBatch(1, 4096),
        SequenceBatch(1, 32_768),
        SequenceBatch(16, 4096),
        SequenceBatch(64, 2048),
        SequenceBatch(256, 1024),
        SequenceBatch(64, 1024, longest=32_768),
        SequenceBatch(64, 2048, int8=True),
        SequenceBatch(1, 32_768, 64),
        SequenceBatch(1, 4096, 4096),
        SequenceBatch(1, 32_768, 4096),
    ),
    # of Qwen3-30B-A3B
    experts=ExpertLayer(hidden=2048, intermediate=768, num_experts=128, top_k=8),
    expert_rows=(1, 8, 64, 256, 2048),
    alone=RequestGroup(requests=1, prompt=128, answer=256),
    depths=(4096, 32_768),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    each=RequestGroup(requests=1, prompt=128, answer=64),
    overload=RequestGroup(requests=768, prompt=128, answer=128),
    mixed_requests=256,
    mixed_tokens=(100, 1024),
    lognormal=RequestGroup(requests=512, prompt=202, answer=179),
    prefix=2048,
    with_prefix=RequestGroup(requests=64, prompt=64, answer=128),
    chats=16,
    turns=8,
    turn=RequestGroup(requests=1, prompt=64, answer=96),
    mixture_batches=(1, 8, 64),
    long=32_768,
    beside_long=RequestGroup(requests=63, prompt=1024, answer=64),
    long_turn=RequestGroup(requests=10, prompt=64, answer=8),
    by_cache=RequestGroup(requests=64, prompt=2048, answer=64),
    steps=40,
    profiled_prompt=2048,
    step_batches=(1, 64, 256),
    peer=RequestGroup(requests=64, prompt=128, answer=128),
    peer_ready_s=90.0,
    compiler="inductor",
    kv_tokens=330_000,
)
QUICK = GpuPlan(
    plain=shapes.PLAIN_TINY,
    int4=shapes.INT4_TINY,
    fp8=shapes.FP8_TINY,
    small=shapes.PLAIN_TINY,
    large=shapes.INT4_TINY,
    mixture=shapes.MIXTURE_TINY,
    rounds=1,
    call_s=600.0,
    copy_bytes=4 << 20,
    product_side=128,
    checked=case.QUICK,
    product_rows=(1, 16),
    attention_batches=(
        SequenceBatch(1, 256),
        SequenceBatch(4, 64),
        SequenceBatch(4, 64, longest=256),
        SequenceBatch(4, 64, int8=True),
        SequenceBatch(1, 64, 64),
        SequenceBatch(1, 256, 64),
    ),
    experts=ExpertLayer(hidden=128, intermediate=64, num_experts=8, top_k=2),
    expert_rows=(1, 16),
    alone=RequestGroup(requests=1, prompt=16, answer=8),
    depths=(32, 128),
    batches=(1, 4),
    each=RequestGroup(requests=1, prompt=16, answer=8),
    overload=RequestGroup(requests=5, prompt=16, answer=4),
    mixed_requests=3,
    mixed_tokens=(8, 32),
    lognormal=RequestGroup(requests=3, prompt=20, answer=12),
    prefix=64,
    with_prefix=RequestGroup(requests=4, prompt=8, answer=8),
    chats=2,
    turns=2,
    turn=RequestGroup(requests=1, prompt=8, answer=8),
    mixture_batches=(1, 3),
    long=256,
    beside_long=RequestGroup(requests=3, prompt=32, answer=8),
    long_turn=RequestGroup(requests=2, prompt=16, answer=4),
    by_cache=RequestGroup(requests=3, prompt=64, answer=8),
    steps=5,
    profiled_prompt=64,
    step_batches=(1, 3),
    peer=RequestGroup(requests=2, prompt=16, answer=8),
    peer_ready_s=150.0,
    compiler="eager",
    kv_tokens=8192,
)

# share of the memory for the weights of `plain`: with a KV cache, and twice beside a peer
_PLAIN_SHARE = 0.4
# share for those of `large`: KV cache and working memory are small
_LARGE_SHARE = 0.7
# share for those of `mixture`, which has fewer layers where they do not fit
_MIXTURE_SHARE = 0.8
_FORMATS = (
    (shapes.PLAIN_8B, shapes.INT4_8B, shapes.FP8_8B),
    (shapes.PLAIN_3B, shapes.INT4_3B, shapes.FP8_3B),
    (shapes.PLAIN_1B, shapes.INT4_1B, shapes.FP8_1B),
)
_LARGE = (shapes.INT4_70B, shapes.PLAIN_8B, shapes.INT4_8B, shapes.PLAIN_3B, shapes.PLAIN_1B)


def full_plan(memory_bytes: int) -> GpuPlan:
    """FULL with the largest models that fit a device with this memory."""
    plain, int4, fp8 = next(
        (of for of in _FORMATS if of[0].weight_bytes <= _PLAIN_SHARE * memory_bytes), _FORMATS[-1]
    )
    most_bytes = _LARGE_SHARE * memory_bytes
    large = next((shape for shape in _LARGE if shape.weight_bytes <= most_bytes), _LARGE[-1])
    copy_bytes = min(FULL.copy_bytes, 1 << (memory_bytes // 8).bit_length() - 1)
    mixture = _mixture(FULL.mixture, _MIXTURE_SHARE * memory_bytes)
    return replace(
        FULL,
        plain=plain,
        int4=int4,
        fp8=fp8,
        large=large,
        mixture=mixture,
        copy_bytes=copy_bytes,
    )


def _mixture(whole: Shape, most_bytes: float) -> Shape:
    """The model, or the part of it with as many layers as fit."""
    fewer = [with_layers(whole, count) for count in range(whole.spec.num_layers - 1, 0, -1)]
    return next(shape for shape in (whole, *fewer) if shape.weight_bytes <= most_bytes)
