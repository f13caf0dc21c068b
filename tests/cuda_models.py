"""Tiny random models of every supported architecture, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from localgen.backends.cuda.batch import arrange, on_device
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.pages import PAGE_TOKENS
from localgen.backends.cuda.spec import read_config
from localgen.backends.cuda.weights import load_weights
from localgen.backends.engine.runner import Chunk
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import BASE_SAMPLING

VOCAB, MAX_LEN = 160, 256
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    # a vocabulary and key-value heads that two ranks cannot have equal parts of
    "llama_biases": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "vocab_size": VOCAB + 3,
        },
    ),
    "llama3_tied": ("LlamaConfig", {"rope_parameters": _LLAMA_3, "tie_word_embeddings": True}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **_EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True, **_EXPERTS},
    ),
}


def make(name: str, folder: Path) -> Any:
    """A random transformers model in float32, saved to `folder` in the usual layout."""
    torch.manual_seed(sum(map(ord, name)))
    kind, more = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**(_SIZES | more))
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    for tensor_name, tensor in model.named_parameters():
        # the usual start leaves norms and biases at 1 and 0, where mistakes do not show
        scale = 0.3 if "norm" in tensor_name or "bias" in tensor_name else 0.0
        tensor.data += scale * torch.randn_like(tensor)
    model.eval()
    model.save_pretrained(folder)
    return model


def random_text(*, seed: int, length: int) -> list[int]:
    """Tokens of no meaning, special ones not among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


class Model:
    """A decoder with a cache whose pages are dealt out at random."""

    def __init__(self, folder: Path, *, sequences: int = 4) -> None:
        spec = read_config(folder)
        weights = load_weights(folder, spec, device="cpu", dtype=torch.float32)
        each = MAX_LEN // PAGE_TOKENS
        self.decoder = Decoder(spec, weights, MAX_LEN)
        self.cache = KVCache.zeros(spec, each * sequences, device="cpu", dtype=torch.float32)
        for tensor in (part for layer in self.cache.layers for part in layer.tensors):
            tensor.fill_(torch.nan)  # nothing may be read before it is written
        self._pages = np.random.default_rng(0).permutation(each * sequences).astype(np.int32)
        self._each = each

    def step(self, parts: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        """Logits after every token of each part (sequence, start, tokens)."""
        names = {number: _sequence(number) for number, _, _ in parts}
        chunks = [
            Chunk(
                seq=names[n], start=start, tokens=tokens, num_drafts=len(tokens) - 1, samples=True
            )
            for n, start, tokens in parts
        ]

        def table(seq: Sequence) -> Any:
            return self._pages[int(seq.id) * self._each : (int(seq.id) + 1) * self._each]

        batch = on_device(arrange(chunks, table), torch.device("cpu"))
        logits = self.decoder.forward(batch, self.cache)
        return list(torch.split(logits, [len(tokens) for _, _, tokens in parts]))


def _sequence(number: int) -> Sequence:
    return Sequence(
        id=str(number), tokens=[], num_prompt=0, params=BASE_SAMPLING, ctx=MAX_LEN, limit=MAX_LEN
    )
