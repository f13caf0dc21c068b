"""Tiny random models of every architecture, each with a real tokenizer of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cuda_configs import write_config
from quant_tokenizers import PIECES, byte_level, pieces, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

# llama.cpp's smallest
CTX = 256
# beyond CTX, other factors apply
LONG = {"original_max_position_embeddings": CTX, "max_position_embeddings": 4 * CTX}
# tokenizer of each, and what differs from cuda_configs
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama 2", {}),
    "llama first files": ("llama 2", {}),
    "llama biases": ("llama 2", {}),
    "llama tied": ("llama-bpe", {}),
    "llama 3.1": ("llama-bpe", {}),
    "llama linear": ("smaug-bpe", {}),
    "mistral": ("mistral", {}),
    "mistral window": ("tekken", {"sliding_window": 128}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {}),
    "qwen3": ("qwen2", {}),
    "qwen3 yarn mscale": ("qwen2", {}),
    # another query scale, which is folded into the weights
    "gemma2": ("gemma", {}),
    "gemma3": ("gemma", {}),
    "gemma3 listed": ("gemma", {}),
    "phi3": ("llama 2", {"sliding_window": 128}),
    "phi3 longrope": ("llama 2", LONG),
    "phi4 mini": ("gpt-4o", LONG),
    "mixtral": ("mistral", {}),
    "qwen3 moe": ("qwen2", {}),
}


def model_folder(name: str, folder: Path) -> Path:
    """A random model with a real tokenizer, of weights that F16 can hold."""
    family, changes = MODELS[name]
    tokenizer = pieces(family) if family in PIECES else byte_level(family)
    vocab = len(tokenizer["model"]["vocab"])
    config = AutoConfig.from_pretrained(write_config(folder, name, **changes, vocab_size=vocab))
    torch.manual_seed(sum(map(ord, name)))
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    for parameter in model.parameters():
        parameter.data = (parameter.data.normal_() * 0.2).half().float()
    model.save_pretrained(folder)
    write_config(folder, name, **changes, vocab_size=vocab)  # as public files have it
    ends = {"bos_token": "<s>", "eos_token": "</s>"} if vocab < 1000 else {}
    write_tokenizer(folder, tokenizer, **ends)
    return folder
