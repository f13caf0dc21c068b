"""The decoder: forward pass over a ragged batch, for all architectures of ModelSpec."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.attention.paged import paged_attention
from localgen.backends.cuda.kernels.dependent_launch import supports_dependent_launch
from localgen.backends.cuda.kernels.fp8_rows import Fp8Rows
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import dependent_launches
from localgen.backends.cuda.kernels.moe.fused_experts import fused_experts
from localgen.backends.cuda.kernels.moe.grouped_experts import ExpertRouting
from localgen.backends.cuda.kernels.norm import rms_norm, rms_norm_fp8
from localgen.backends.cuda.kernels.rope import QKNorm, rope_and_store_kv
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.model.batch import StepBatch
from localgen.backends.cuda.model.fused_layer import MAX_FUSED_ROWS, FusedLayer
from localgen.backends.cuda.model.host_copy import (
    HostCopy,
    device_errors,
    to_device,
    to_device_beside_steps,
    to_host_beside_steps,
)
from localgen.backends.cuda.model.linear import Linear, gated_mlp, project, takes_fp8_rows
from localgen.backends.cuda.model.process_group import TensorParallelGroup
from localgen.backends.cuda.model.weights import DecoderWeights, ExpertWeights, LayerWeights
from localgen.backends.formats.architecture.model_spec import Activation, ModelSpec, MoeConfig
from localgen.backends.formats.architecture.rope import Rope
from localgen.backends.formats.architecture.sharding import ModelShard


def select_experts(x: Tensor, experts: ExpertWeights, moe: MoeConfig) -> ExpertRouting:
    """Route each row to its top-k experts; returns their ids and weights."""
    shares, ids = experts.router(x).float().softmax(-1).topk(moe.top_k)
    if moe.normalize_topk:
        shares = shares / shares.sum(-1, keepdim=True)
    return ExpertRouting(ids, shares)


def moe_forward(
    x: Tensor, experts: ExpertWeights, moe: MoeConfig, activation: Activation
) -> Tensor:
    """Weighted sum of the outputs of each row's experts. x: [rows, hidden]."""
    return fused_experts(
        x, experts.gate_up, experts.down, select_experts(x, experts, moe), activation
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers."""

    layers: list[LayerKV]

    @classmethod
    def zeros(
        cls, spec: ModelSpec, num_pages: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> KVCache:
        """Allocate a zeroed KV cache. dtype: a float type, int8 or float8_e4m3fn."""
        shape = (num_pages, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim)
        return cls(
            [LayerKV.zeros(shape, device=device, dtype=dtype) for _ in range(spec.num_layers)]
        )

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages, given as (source, target). Does not synchronize with the device."""
        if pairs:
            (pages,) = to_device([np.array(pairs, np.int64)], self.layers[0].keys.device)
            sources, targets = pages.unbind(1)
            for layer in self.layers:
                for tensor in layer.tensors:
                    tensor[targets] = tensor[sources]

    def read_pages(self, pages: Seq[int]) -> HostCopy:
        """See PageMemory.read_pages.

        Gathered on the stream of the steps, behind those that were launched before; the transfer
        runs beside later ones.
        """
        with device_errors():
            (index,) = to_device([np.array(pages, np.int64)], self.layers[0].keys.device)
            parts = [
                tensor[index].flatten(1).view(torch.uint8)
                for layer in self.layers
                for tensor in layer.tensors
            ]
            return to_host_beside_steps(torch.cat(parts, 1))

    def write_pages(self, pages: Seq[int], state: NDArray[np.uint8]) -> None:
        """See PageMemory.write_pages. Waits for nothing.

        The transfer runs beside the steps that were launched before; later ones wait for it.
        """
        device, at = self.layers[0].keys.device, 0
        with device_errors():
            index, content = to_device_beside_steps(
                [np.array(pages, np.int64), state.ravel()], device
            )
            rows = content.view(len(pages), -1)
            for layer in self.layers:
                for tensor in layer.tensors:
                    size = tensor[0].nbytes
                    part = rows[:, at : at + size].contiguous().view(tensor.dtype)
                    tensor[index] = part.view(len(pages), *tensor.shape[1:])
                    at += size


class Decoder:
    """Weights and RoPE tables of a decoder. max_len: maximum sequence length.

    group: the tensor-parallel group, if spec and weights are those of a shard. dependent_launch:
    use programmatic dependent launch where the GPU has it: -6 to +5% of the speed on an H100.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        max_len: int,
        group: TensorParallelGroup | None = None,
        *,
        dependent_launch: bool = False,
    ) -> None:
        self.spec, self.max_len = spec, max_len
        self._group = group or TensorParallelGroup(ModelShard(spec))
        self._weights = weights
        self._fused_layers = _fused_layers(spec, weights, self._group)
        self._dependent_launch = (
            dependent_launch
            and self._group.shard.tp_size == 1
            and supports_dependent_launch(weights.embed)
        )
        device = weights.embed.device
        self._ropes = _layer_ropes(spec, max_len, device)
        scaling = spec.query_scaling
        self._query_factors = None if scaling is None else scaling.table(max_len).to(device)

    @property
    def group(self) -> TensorParallelGroup:
        """The ranks that share the layers."""
        return self._group

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Logits of batch.output_rows, float32 [outputs, vocab].

        Stores keys and values in the cache. out: optional output tensor.
        """
        with dependent_launches(self._dependent_launch):
            hidden = self._weights.head(self.hidden_states(batch, cache))
        found = self._group.gather_logits(hidden)
        logits = found.float() if out is None else out.copy_(found)
        if self.spec.logit_divisor != 1:
            logits.div_(self.spec.logit_divisor)
        cap = self.spec.logit_softcap
        if cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @torch.inference_mode()
    def hidden_states(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Final hidden states of batch.output_rows after the last norm, [outputs, hidden].

        Stores keys and values in the cache.
        """
        spec, weights = self.spec, self._weights
        hidden = self._group.vocab_parallel_embedding(weights.embed, batch.tokens)
        if spec.embed_scale != 1:
            hidden = hidden * torch.tensor(spec.embed_scale, dtype=hidden.dtype)
        query_factors = None
        if self._query_factors is not None:
            query_factors = self._query_factors[batch.positions.long(), None, None].to(hidden.dtype)
        residual = None
        if self._fused_layers and len(hidden) <= MAX_FUSED_ROWS:
            for index, fused in enumerate(self._fused_layers):
                queries = fused.store_kv(hidden, batch, self._ropes[index], cache.layers[index])
                mixed = self._attend(index, queries, batch, cache, query_factors)
                hidden = fused.add_mlp(fused.add_attention(hidden, mixed))
        else:
            hidden, residual = self._run_layers(hidden, batch, cache, query_factors)
        rows = batch.output_rows
        kept = None if residual is None else residual[rows]
        normed, _ = self._norm(self._scaled(hidden[rows], kept), weights.norm, kept)
        return normed

    def _run_layers(
        self, hidden: Tensor, batch: StepBatch, cache: KVCache, query_factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the last layer, and the residual stream without it (None: no layers)."""
        residual: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed, residual = self._add_and_norm(hidden, layer.input_norm, residual, layer.qkv)
            queries = self._store_kv(index, project(layer.qkv, normed), batch, cache)
            mixed = self._attend(index, queries, batch, cache, query_factors)
            hidden = self._group.all_reduce(layer.attention_out(mixed))
            if layer.post_attention_norm is not None:
                hidden, _ = self._norm(hidden, layer.post_attention_norm, None)
            normed, residual = self._add_and_norm(hidden, layer.mlp_norm, residual, layer.gate_up)
            hidden = self._mlp(layer, normed)
            if layer.post_mlp_norm is not None:
                hidden, _ = self._norm(hidden, layer.post_mlp_norm, None)
        return hidden, residual

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return rms_norm(
            x, weight, self.spec.norm_eps, offset=self.spec.norm_offset, residual=residual
        )

    def _scaled(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """x as it is added to the residual stream."""
        scale = 1 if residual is None else self.spec.residual_scale
        return x if scale == 1 else x * scale

    def _add_and_norm(
        self, x: Tensor, weight: Tensor | None, residual: Tensor | None, linear: Linear | None
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        """Norm of x + residual, and the sum: the residual stream.

        weight: None: no norm. linear: that the norm is for, or None for experts.
        """
        x = self._scaled(x, residual)
        if weight is not None:
            if takes_fp8_rows(linear, x):
                spec = self.spec
                return rms_norm_fp8(
                    x, weight, spec.norm_eps, offset=spec.norm_offset, residual=residual
                )
            return self._norm(x, weight, residual)
        summed = x if residual is None else x + residual
        return summed, summed

    def _store_kv(self, index: int, qkv: Tensor, batch: StepBatch, cache: KVCache) -> Tensor:
        """Return the rotated queries of a layer; write its keys and values to the cache."""
        spec, layer, norms = self.spec, self._weights.layers[index], None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = QKNorm(layer.q_norm, layer.k_norm, spec.norm_eps, spec.norm_offset)
            if spec.wide_qk_norm:
                qkv, norms = _norm_all_heads(qkv, norms), None
        return rope_and_store_kv(
            qkv,
            batch.positions,
            self._ropes[index],
            norms,
            cache.layers[index],
            batch.slot_mapping,
        )

    def _attend(
        self,
        index: int,
        queries: Tensor,
        batch: StepBatch,
        cache: KVCache,
        query_factors: Tensor | None,
    ) -> Tensor:
        """Attention of a layer, [rows, heads * head size].

        queries: after RoPE. query_factors: [rows, 1, 1], multiply them, or None for 1.
        """
        spec = self.spec
        if query_factors is not None:
            queries = queries * query_factors
        mixed = paged_attention(
            queries,
            cache.layers[index],
            batch.attn_metadata,
            scale=spec.attn_scale,
            window=spec.sliding_windows[index],
            softcap=spec.attn_softcap,
        )
        return mixed.flatten(1)

    def _mlp(self, layer: LayerWeights, x: Tensor | Fp8Rows) -> Tensor:
        if layer.experts is not None:
            assert self.spec.moe is not None
            assert isinstance(x, Tensor)
            return self._group.all_reduce(
                moe_forward(x, layer.experts, self.spec.moe, self.spec.activation)
            )
        assert layer.gate_up is not None
        assert layer.down is not None
        return self._group.all_reduce(gated_mlp(layer.gate_up, layer.down, x, self.spec.activation))


def _fused_layers(
    spec: ModelSpec, weights: DecoderWeights, group: TensorParallelGroup
) -> list[FusedLayer]:
    """All layers, if each can be fused; otherwise none. Ranks sum in between."""
    if group.shard.tp_size > 1:
        return []
    fused = [FusedLayer.of(layer, spec) for layer in weights.layers]
    found = [layer for layer in fused if layer is not None]
    return found if len(found) == len(fused) else []


def _norm_all_heads(qkv: Tensor, norms: QKNorm) -> Tensor:
    """qkv with RMSNorm over all heads of q together, and over all of k."""
    queries, keys = len(norms.q_weight), len(norms.k_weight)
    q, k, v = torch.split(qkv, [queries, keys, keys], -1)
    q, _ = rms_norm(q, norms.q_weight, norms.eps, offset=norms.offset, residual=None)
    k, _ = rms_norm(k, norms.k_weight, norms.eps, offset=norms.offset, residual=None)
    return torch.cat([q, k, v], -1)


def _layer_ropes(
    spec: ModelSpec, max_len: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """cos and sin of each layer; layers of the same kind share them."""
    ropes = [spec.layer_rope(index) for index in range(spec.num_layers)]
    tables: dict[Rope | None, tuple[Tensor, Tensor]] = {}
    for rope in set(ropes):
        if rope is None:  # the identity, so that all layers run the same kernel
            cos = torch.ones(max_len, spec.rope.dim // 2)
            tables[rope] = cos.to(device), torch.zeros_like(cos, device=device)
        else:
            cos, sin = rope.cos_sin_table(max_len)
            tables[rope] = cos.to(device), sin.to(device)
    return [tables[rope] for rope in ropes]
