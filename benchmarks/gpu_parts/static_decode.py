"""A peer similar to gpt-fast: static KV cache, torch.compile, one CUDA graph per token.

A minimal loop for one sequence: no scheduler, no pages, argmax sampling. One compiled function is
used for all layers, which takes seconds to compile where the whole model would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_parts.device import Device
from localgen.backends.cuda.model.linear import DenseLinear, Linear
from localgen.backends.cuda.model.weights import DecoderWeights, LayerWeights
from localgen.backends.formats.architecture.model_spec import ModelSpec


class StaticDecode:
    """Decodes one sequence with a Llama. compiler: torch.compile's backend."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        device: Device,
        *,
        max_len: int,
        compiler: str,
    ) -> None:
        self._spec, self._weights, self._device = spec, weights, device
        shape = (2, 1, spec.num_kv_heads, max_len, spec.head_dim)
        kinds: dict[str, Any] = {"device": device.torch, "dtype": weights.embed.dtype}
        self._caches = [torch.zeros(shape, **kinds) for _ in weights.layers]
        self._rotation = [part.to(device.torch) for part in spec.rope.cos_sin_table(max_len)]
        self._visible = torch.ones(max_len, max_len, dtype=torch.bool, device=device.torch).tril()
        self.token = torch.zeros(1, dtype=torch.int64, device=device.torch)
        self.position = torch.zeros(1, dtype=torch.int64, device=device.torch)
        self.generated = torch.zeros(max_len, dtype=torch.int64, device=device.torch)
        options: Any = {"coordinate_descent_tuning": True} if compiler == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(
            _layer, backend=compiler, fullgraph=True, dynamic=False, options=options
        )
        self._decode_layer = compiled
        self._step: Callable[[], None] = self._one

    def warm_up(self) -> None:
        """Compile the layer; on a GPU, capture the step."""
        with torch.inference_mode():
            for _ in range(3):
                self._one()
            if self._device.is_gpu:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._one()
                self._step = graph.replay

    @torch.inference_mode()
    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """Prefill a prompt for decoding; return the logits of its last token, [vocab]."""
        given = torch.tensor(tokens, device=self._device.torch)
        logits = self._forward(given, torch.arange(len(tokens), device=self._device.torch), _layer)
        self.token.copy_(logits[-1:].argmax(-1))
        self.position.fill_(len(tokens))
        return logits[-1]

    def decode_s(self, tokens: Sequence[int], count: int) -> float:
        """Seconds to generate `count` tokens after this prompt, without the first token."""
        self.prompt(tokens)
        self._device.synchronize()
        begun_s = time.perf_counter()
        with torch.inference_mode():
            for _ in range(count - 1):
                self._step()
        self._device.synchronize()
        return time.perf_counter() - begun_s

    def _one(self) -> None:
        logits = self._forward(self.token, self.position, self._decode_layer)
        self.token.copy_(logits.argmax(-1))
        self.generated.index_copy_(0, self.position, self.token)
        self.position.add_(1)

    def _forward(self, tokens: Tensor, positions: Tensor, layer: Callable[..., Any]) -> Tensor:
        spec, weights = self._spec, self._weights
        x = weights.embed[tokens]
        rotation = [part[positions] for part in self._rotation]
        visible = self._visible[positions]
        for own, cache in zip(weights.layers, self._caches, strict=True):
            x = layer(x, *rotation, visible, positions, cache, spec.norm_eps, *_parts(own))
        normed = _norm(x[-1:], weights.norm, spec.norm_eps)
        return functional.linear(normed, _dense(weights.head))


def _parts(layer: LayerWeights) -> tuple[Tensor, ...]:
    assert layer.gate_up is not None
    assert layer.input_norm is not None
    assert layer.mlp_norm is not None
    assert layer.down is not None
    linears = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    return layer.input_norm, layer.mlp_norm, *map(_dense, linears)


def _dense(linear: Linear) -> Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    visible: Tensor,
    positions: Tensor,
    cache: Tensor,
    eps: float,
    input_norm: Tensor,
    mlp_norm: Tensor,
    qkv: Tensor,
    out: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> Tensor:
    """x: [rows, hidden]. visible: bool [rows, max_len]. cache: [2, 1, kv heads, max_len, size]."""
    kv_heads, size = cache.shape[2], cache.shape[4]
    parts = functional.linear(_norm(x, input_norm, eps), qkv).view(len(x), -1, size)
    heads = parts.shape[1] - 2 * kv_heads
    q, k, v = torch.split(parts, [heads, kv_heads, kv_heads], 1)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    cache[0].index_copy_(2, positions, k.transpose(0, 1)[None])
    cache[1].index_copy_(2, positions, v.transpose(0, 1)[None])
    mixed = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], cache[0], cache[1], attn_mask=visible, enable_gqa=True
    )
    x = x + functional.linear(mixed[0].transpose(0, 1).flatten(1), out)
    gate, up = functional.linear(_norm(x, mlp_norm, eps), gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)
