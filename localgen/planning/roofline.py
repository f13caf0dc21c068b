"""Roofline of a decode step: the time to read its bytes, and the time to compute its products.

Upper limits: every byte is read once at full bandwidth, and all products are computed at the peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from localgen.backends.formats.architecture.model_shape import ModelShape, kv_cache_read_bytes

_MOST_REQUESTS = 1 << 20
_LINK_ELEMENT_BYTES = 2
Side = Literal["memory", "compute", "links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Bytes that a step of a model reads, and its floating-point operations.

    weights_bytes: of all weights in memory. read_bytes: those read for one token, with its active
    experts. expert_bytes: of all experts. flops_per_token: of the weights, without attention; None
    if unknown. cache_types: of keys and values. buffer_bytes: buffers of any number of requests;
    token_bytes: of the KV cache and its buffers, per token.
    """

    weights_bytes: float
    read_bytes: float
    expert_bytes: float
    flops_per_token: float | None
    shape: ModelShape
    cache_types: tuple[str, str]
    buffer_bytes: float
    token_bytes: float

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step with this number of tokens reads.

        Of a mixture of experts: of the experts that at least one of the tokens needs, on average,
        if each token's experts are drawn at random.
        """
        shape = self.shape
        if not shape.num_experts or shape.num_active_experts >= shape.num_experts:
            return self.read_bytes
        active = shape.num_active_experts / shape.num_experts
        needed = 1 - float((1 - active) ** tokens)
        return self.read_bytes + self.expert_bytes * (needed - active)

    def cache_read(self, ctx: int) -> float:
        """Bytes of one request's KV cache and recurrent state that a step reads."""
        key, value = self.cache_types
        return (
            kv_cache_read_bytes(self.shape.layer_caches, key, value, ctx) + self.shape.state_bytes
        )

    def attention_flops(self, ctx: int) -> float:
        """Operations of attention for one token behind a context."""
        return sum(
            # latent attention keeps no values of its own
            2 * self.shape.num_heads * (one.key_dim + (one.value_dim or one.key_dim))
            * min(ctx, one.window or ctx)
            for one in self.shape.layer_caches
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """Peak figures of one device, of which `count` share the model (tensor parallelism).

    flops: of products with these weights, in operations/s; None if unknown. attention_flops: of
    attention; None if unknown, and then attention takes no time to compute. free_bytes: memory for
    the model. link_bytes_per_s: between the devices, in one direction. source: of the figures, for
    users. price: of one device per hour, in any currency; None if unknown.
    """

    name: str
    bytes_per_s: float
    flops: float | None
    attention_flops: float | None
    free_bytes: float
    source: str
    count: int = 1
    link_bytes_per_s: float | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Upper limits of a model on a device, all requests having the same context.

    name: of the model with its quantization. ctx: tokens in the KV cache of each request. draft: of
    the draft model on the same device, whose memory counts.
    """

    name: str
    costs: ModelCosts
    device: DeviceLimits
    ctx: int
    draft: Roofline | None = None

    def memory_s(self, requests: float, tokens_each: int = 1) -> float:
        """Time to read the weights and the KV caches for a step."""
        weights = self.costs.weights_read(requests * tokens_each) / self.device.count
        return weights / self.device.bytes_per_s + self._cache_s(requests)

    def _cache_s(self, requests: float) -> float:
        read = requests * self.costs.cache_read(self.ctx) / self._cache_parts
        return read / self.device.bytes_per_s

    def compute_s(self, requests: float, tokens_each: int = 1) -> float:
        """Time to compute a step; 0 if the peak, or the number of operations, is unknown."""
        if self.device.flops is None or self.costs.flops_per_token is None:
            return 0.0
        each_s = self.costs.flops_per_token / self.device.flops
        if self.device.attention_flops is not None:
            each_s += self.costs.attention_flops(self.ctx) / self.device.attention_flops
        return requests * tokens_each * each_s / self.device.count

    def link_s(self, requests: float, tokens_each: int = 1) -> float:
        """Time of the two all-reduces of each layer, without their latency."""
        count, rate = self.device.count, self.device.link_bytes_per_s
        if count == 1 or rate is None:
            return 0.0
        shape = self.costs.shape
        sums = 2 * shape.num_layers * shape.hidden_size * _LINK_ELEMENT_BYTES
        return requests * tokens_each * sums * 2 * (count - 1) / count / rate

    def step_s(self, requests: float, tokens_each: int = 1) -> float:
        """Shortest time of a step with `tokens_each` tokens of each request."""
        slower = max(self.memory_s(requests, tokens_each), self.compute_s(requests, tokens_each))
        return slower + self.link_s(requests, tokens_each)

    def tokens_per_s(self, requests: float) -> float:
        """Most tokens per second of all requests together."""
        return requests / self.step_s(requests)

    def side(self, requests: float) -> Side:
        """The resource that limits a step: memory, compute or links."""
        sides: dict[Side, float] = {
            "memory": self.memory_s(requests),
            "compute": self.compute_s(requests),
            "links": self.link_s(requests),
        }
        return max(sides, key=lambda side: sides[side])

    def cache_share(self, requests: float) -> float:
        """Share of the KV caches in the bytes that a step reads."""
        return self._cache_s(requests) / self.memory_s(requests)

    def cost_per_million(self, requests: float) -> float | None:
        """Price of a million tokens; None without a price of the device."""
        if self.device.price is None:
            return None
        per_s = self.device.price * self.device.count / 3600
        return per_s / self.tokens_per_s(requests) * 1e6

    @property
    def fits(self) -> bool:
        """True if the weights and one request fit."""
        return self.max_requests >= 1

    @property
    def free_bytes(self) -> float:
        """Memory of one device that is left for KV caches; negative if the weights do not fit."""
        drafts = 0.0 if self.draft is None else self.draft.device.free_bytes - self.draft.free_bytes
        weights = self.costs.weights_bytes / self.device.count
        return self.device.free_bytes - weights - self.costs.buffer_bytes - drafts

    @property
    def request_bytes(self) -> float:
        """KV cache, recurrent state and buffers of one request, in all devices together."""
        return self.costs.token_bytes * self.ctx + self.costs.shape.state_bytes

    @property
    def _request_part_bytes(self) -> float:
        """The part of a request in one device, with its draft model's."""
        drafts = 0.0 if self.draft is None else self.draft._request_part_bytes
        return self.request_bytes / self._cache_parts + drafts

    @property
    def max_requests(self) -> int:
        """Most requests of this context that fit in memory."""
        if self.free_bytes < 0:
            return 0
        each = self._request_part_bytes
        return min(_MOST_REQUESTS, int(self.free_bytes / each)) if each else _MOST_REQUESTS

    @property
    def ridge(self) -> int | None:
        """Fewest requests at which computing takes as long as reading.

        None: at no number, as the KV caches alone take longer to read, or if it is unknown.
        """

        def computes(requests: int) -> bool:
            return self.compute_s(requests) >= self.memory_s(requests)

        if not computes(_MOST_REQUESTS):
            return None
        low, high = 0, _MOST_REQUESTS  # it changes once: the weights read grow ever slower
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if computes(middle) else (middle, high)
        return high

    def at_context(self, ctx: int) -> Roofline:
        """The same with another context."""
        return replace(self, ctx=ctx, draft=self.draft and replace(self.draft, ctx=ctx))

    @property
    def _cache_parts(self) -> float:
        """Divisor of the KV cache per device; each device has a head at least."""
        count = self.device.count
        heads = max((one.num_kv_heads for one in self.costs.shape.layer_caches), default=count)
        return heads / math.ceil(heads / count)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Mean tokens of a step that verifies `drafts` draft tokens, with the target's own one.

    acceptance: probability that a draft is accepted, the same for each. Leviathan et al. 2023,
    equation 1: (1 - a^(k+1)) / (1 - a).
    """
    return sum(acceptance**position for position in range(drafts + 1))


def speculative_speedup(roofline: Roofline, acceptance: float, drafts: int) -> float:
    """Speed of one request with drafts, relative to that without.

    They take steps of the draft model, or no time if they come from the text itself.
    """
    draft_s = 0.0 if roofline.draft is None else roofline.draft.step_s(1)
    step_s = roofline.step_s(1, drafts + 1) + drafts * draft_s
    return expected_tokens(acceptance, drafts) * roofline.step_s(1) / step_s
