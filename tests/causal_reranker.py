"""A tiny random Qwen3 reranker: in transformers, and as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files as files
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

WIDTH, HEAD, CONTEXT, MLP = 64, 32, 512, 96
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "score": "cls.output"}
_NUMBERS = {
    "context_length": CONTEXT,
    "embedding_length": WIDTH,
    "feed_forward_length": MLP,
    "block_count": 2,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "pooling_type": 4,
}


class CausalReranker:
    """path: the GGUF file, whose classes are yes and no."""

    def __init__(self, folder: Path, template: str) -> None:
        torch.manual_seed(0)
        config: Any = Qwen3Config(
            vocab_size=4096,
            hidden_size=WIDTH,
            intermediate_size=MLP,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=HEAD,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,
            pad_token_id=0,
        )
        config.num_labels = 2
        make: Any = Qwen3ForSequenceClassification
        self.model = make(config)
        self.model.eval()
        changes: dict[str, files.Change] = {
            f"qwen3.{name}": (number, files.UINT32) for name, number in _NUMBERS.items()
        }
        changes["qwen3.attention.layer_norm_rms_epsilon"] = (config.rms_norm_eps, files.FLOAT32)
        changes["tokenizer.chat_template.rerank"] = (template, files.STRING)
        weights = {_gguf_name(name): each for name, each in self.model.state_dict().items()}
        labels = {"qwen3.classifier.output_labels": ["yes", "no"]}
        self.path = folder / "causal.gguf"
        files.with_weights(self.path, "qwen3", changes, weights, labels)

    def score(self, tokens: list[int]) -> float:
        """The probability of yes."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens])).logits
        return float(logits.softmax(-1)[0, 0])


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return _OUTER[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}"
