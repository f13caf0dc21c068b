"""The decoder: one forward pass over a ragged batch, for every architecture of ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.attention.paged import paged_attention
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.moe.fused_experts import mixture as mixed
from localgen.backends.cuda.kernels.moe.grouped_experts import Chosen
from localgen.backends.cuda.kernels.norm import rms_norm
from localgen.backends.cuda.kernels.rope import HeadNorms, rope_and_store
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.batch import Batch
from localgen.backends.cuda.model.linear import gated_linear
from localgen.backends.cuda.model.process_group import Ranks
from localgen.backends.cuda.model.weights import Experts, LayerWeights, Weights
from localgen.backends.formats.architecture.model_spec import Activation, ModelSpec, Moe
from localgen.backends.formats.architecture.sharding import Shard


def route(x: Tensor, experts: Experts, moe: Moe) -> Chosen:
    """The experts of each row and their shares."""
    shares, ids = experts.router(x).float().softmax(-1).topk(moe.top_k)
    if moe.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return Chosen(ids, shares)


def mixture(x: Tensor, experts: Experts, moe: Moe, activation: Activation) -> Tensor:
    """Weighted sum of the chosen experts' answers. x: [rows, hidden]."""
    return mixed(x, experts.gate_up, experts.down, route(x, experts, moe), activation)


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers."""

    layers: list[LayerKV]

    @classmethod
    def zeros(
        cls, spec: ModelSpec, pages: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> KVCache:
        """An empty cache. dtype: a float, or int8 or float8_e4m3fn."""
        shape = (pages, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
        return cls([LayerKV.zeros(shape, device=device, dtype=dtype) for _ in range(spec.layers)])

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target) each."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            for layer in self.layers:
                for tensor in layer.tensors:
                    tensor[targets] = tensor[sources]


class Decoder:
    """Weights and the tables that depend on positions alone. max_len: longest sequence.

    ranks: those that have the rest of every layer, where spec and weights are those of a shard.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, max_len: int, ranks: Ranks | None = None
    ) -> None:
        self.spec, self.max_len = spec, max_len
        self._ranks = ranks or Ranks(Shard(spec))
        self._weights = weights
        device = weights.embed.device
        self._rope = _on(device, spec.rope.table(max_len))
        self._local_rope = _on(device, (spec.local_rope or spec.rope).table(max_len))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Logits of the rows in batch.outputs, float32 [outputs, vocab]; fills the cache.

        out: where to put them.
        """
        found = self._ranks.whole(self._weights.head(self.states(batch, cache)))
        logits = found.float() if out is None else out.copy_(found)
        cap = self.spec.logit_softcap
        if cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @torch.inference_mode()
    def states(self, batch: Batch, cache: KVCache) -> Tensor:
        """What the head sees of the rows in batch.outputs, [outputs, hidden]; fills the cache."""
        spec, weights = self.spec, self._weights
        hidden = self._ranks.embedded(weights.embed, batch.tokens)
        if spec.embed_scale != 1:
            hidden = hidden * torch.tensor(spec.embed_scale, dtype=hidden.dtype)
        residual: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            normed, residual = self._norm(hidden, layer.input_norm, residual)
            hidden = self._attention(index, layer, normed, batch, cache)
            if layer.post_attention_norm is not None:
                hidden, _ = self._norm(hidden, layer.post_attention_norm, None)
            normed, residual = self._norm(hidden, layer.mlp_norm, residual)
            hidden = self._mlp(layer, normed)
            if layer.post_mlp_norm is not None:
                hidden, _ = self._norm(hidden, layer.post_mlp_norm, None)
        rows = batch.outputs
        kept = None if residual is None else residual[rows]
        normed, _ = self._norm(hidden[rows], weights.norm, kept)
        return normed

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return rms_norm(
            x, weight, self.spec.norm_eps, offset=self.spec.norm_offset, residual=residual
        )

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, batch: Batch, cache: KVCache
    ) -> Tensor:
        spec, window = self.spec, self.spec.windows[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm, spec.norm_eps, spec.norm_offset)
        queries = rope_and_store(
            layer.qkv(x),
            batch.positions,
            self._rope if window is None else self._local_rope,
            norms,
            cache.layers[index],
            batch.slots,
        )
        mixed = paged_attention(
            queries,
            cache.layers[index],
            batch.ragged,
            scale=spec.attn_scale,
            window=window,
            softcap=spec.attn_softcap,
        )
        return self._ranks.sum(layer.out(mixed.flatten(1)))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if layer.experts is not None:
            assert self.spec.moe is not None
            return self._ranks.sum(mixture(x, layer.experts, self.spec.moe, self.spec.activation))
        assert layer.gate_up is not None
        assert layer.down is not None
        return self._ranks.sum(layer.down(gated_linear(layer.gate_up, x, self.spec.activation)))


def _on(device: torch.device, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return table[0].to(device), table[1].to(device)
