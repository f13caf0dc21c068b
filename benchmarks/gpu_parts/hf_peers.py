"""transformers as a peer, with the same weights: static-cache generate, continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.shapes import config_of
from localgen.backends.cuda.model.linear import DenseLinear, Linear
from localgen.backends.cuda.model.weights import DecoderWeights
from localgen.backends.formats.architecture.model_spec import ModelSpec

# share of the memory that the weights leave, because other processes use the device too
_KV_SHARE = 0.2
# for toy models on a CPU, where the share would be gigabytes of attention masks
_CPU_BATCH_TOKENS, _CPU_PAGES, _CPU_PAGE_TOKENS = 64, 8, 32


def hf_model(spec: ModelSpec, weights: DecoderWeights, device: Device) -> Any:
    """Return a transformers model whose parameters share memory with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in config_of(spec, "bfloat16").items() if k != "dtype"})
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(weights.embed.dtype)
    model.load_state_dict(dict(named(spec, weights)), assign=True, strict=not spec.tied_embeddings)
    if spec.tied_embeddings:
        model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device.torch)
    return model.eval().requires_grad_(False)


def named(spec: ModelSpec, weights: DecoderWeights) -> list[tuple[str, Tensor]]:
    """Return the tensors with their names in a checkpoint."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found = [("model.embed_tokens.weight", weights.embed), ("model.norm.weight", weights.norm)]
    if not spec.tied_embeddings:
        found.append(("lm_head.weight", _dense(weights.head)))
    for index, layer in enumerate(weights.layers):
        assert layer.gate_up is not None
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        assert layer.down is not None
        qkv = torch.split(_dense(layer.qkv), [q, kv, kv])
        gate, up = _dense(layer.gate_up).chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.mlp_norm,
            **{f"self_attn.{n}_proj": part for n, part in zip("qkv", qkv, strict=True)},
            "self_attn.o_proj": _dense(layer.attention_out),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": _dense(layer.down),
        }
        found += [(f"model.layers.{index}.{name}.weight", part) for name, part in parts.items()]
    return found


def _dense(linear: Linear) -> Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


class StaticGenerate:
    """generate() with a static cache, which compiles the model's forward pass on a GPU."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, device: Device, *, max_len: int
    ) -> None:
        from transformers import StaticCache

        self._model, self._device = hf_model(spec, weights, device), device
        self._cache: Any = StaticCache(config=self._model.config, max_cache_len=max_len)

    @torch.inference_mode()
    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """Logits after the last token, [vocab]."""
        given = torch.tensor([tokens], device=self._device.torch)
        return self._model(given).logits[0, -1]  # type: ignore[no-any-return]

    def decode_s(self, tokens: Sequence[int], count: int) -> float:
        """Seconds to generate `count` tokens after this prompt, without the first token."""
        return self._generate_s(tokens, count) - self._generate_s(tokens, 1)

    def _generate_s(self, tokens: Sequence[int], count: int) -> float:
        given = torch.tensor([tokens], device=self._device.torch)
        self._cache.reset()
        self._device.synchronize()
        begun_s = time.perf_counter()
        self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self._cache,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        self._device.synchronize()
        return time.perf_counter() - begun_s


class ContinuousBatching:
    """generate_batch() with a persistent manager: cache and graphs remain between rounds."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, device: Device) -> None:
        self._model, self._device = hf_model(spec, weights, device), device
        self._sizes: dict[str, Any] = {"max_memory_percent": _KV_SHARE}
        if not device.is_gpu:
            self._sizes = {
                "max_batch_tokens": _CPU_BATCH_TOKENS,
                "num_blocks": _CPU_PAGES,
                "page_size": _CPU_PAGE_TOKENS,
            }

    @torch.inference_mode()
    def prompt(self, tokens: Sequence[int]) -> Tensor:
        """Logits after the last token, [vocab]."""
        given = torch.tensor([tokens], device=self._device.torch)
        return self._model(given).logits[0, -1]  # type: ignore[no-any-return]

    def serve_s(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Seconds to generate `count` tokens per prompt. Raises RuntimeError if any are missing."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        make: Any = GenerationConfig
        asked = make(max_new_tokens=count, do_sample=False, eos_token_id=-1)
        self._device.synchronize()
        begun_s = time.perf_counter()
        found = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=asked,
            continuous_batching_config=ContinuousBatchingConfig(**self._sizes),
            persistent_manager=True,
        )
        took_s = time.perf_counter() - begun_s
        generated = sum(len(answer.generated_tokens) for answer in found.values())
        if generated != len(prompts) * count:
            raise RuntimeError(f"received {generated} tokens, requested {len(prompts) * count}")
        return took_s
