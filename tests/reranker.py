"""A tiny random BERT with a classifier: in transformers, and as a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (  # type: ignore[attr-defined]
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("the", "sun", "is", "a", "star", "spider", "has", "eight"),
    *("legs", "what", "how", "many", "planet", "moon", "far", "."),
)
CONTEXT = 64
NAMES = {
    "bert.embeddings.word_embeddings": "token_embd",
    "bert.embeddings.position_embeddings": "position_embd",
    "bert.embeddings.token_type_embeddings": "token_types",
    "bert.embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "bert.pooler.dense": "cls",
    "classifier": "cls.output",
}


@dataclass(frozen=True)
class Reranker:
    """model, tokenizer: of transformers. path: the GGUF file."""

    model: Any
    tokenizer: Any
    path: Path

    def encode(self, query: str, document: str) -> list[int]:
        ids: list[int] = self.tokenizer(query, document)["input_ids"]
        return ids

    def score(self, query: str, document: str) -> float:
        """The score of transformers. Token types are all 0, as in llama.cpp."""
        ids = torch.tensor([self.encode(query, document)])
        with torch.no_grad():
            return float(self.model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits)


def make_reranker(folder: Path) -> Reranker:
    torch.manual_seed(0)
    tokens = [*SPECIAL, *WORDS]
    config: Any = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=CONTEXT,
        hidden_act="gelu_new",  # llama.cpp's approximation
        initializer_range=0.4,
    )
    config.num_labels = 1
    model: Any = BertForSequenceClassification(config)
    model.eval()
    tokenizer = BertTokenizerFast(vocab={token: at for at, token in enumerate(tokens)})
    path = folder / "reranker.gguf"
    _write(path, model, config, tokens)
    return Reranker(model, tokenizer, path)


def _write(path: Path, model: Any, config: Any, tokens: list[str]) -> None:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("reranker")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(config.type_vocab_size)
    # a word's beginning is marked, instead of its continuation
    writer.add_token_list([token if token in SPECIAL else f"▁{token}" for token in tokens])
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    ids = {name: SPECIAL.index(f"[{name}]") for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    writer.add_pad_token_id(ids["PAD"])
    writer.add_unk_token_id(ids["UNK"])
    writer.add_bos_token_id(ids["CLS"])
    writer.add_sep_token_id(ids["SEP"])
    writer.add_mask_token_id(ids["MASK"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.dtype == np.float32:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    parts = module.split(".")
    if parts[:3] == ["bert", "encoder", "layer"]:
        return f"blk.{parts[3]}.{NAMES['.'.join(parts[4:])]}.{kind}"
    return f"{NAMES[module]}.{kind}"
