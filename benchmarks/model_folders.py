"""Hugging Face folders of the packaged models, and of a wider one with the same function."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.agreement_parts.logits import transformers_model
from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.hub.packaged import BUILT_IN_PATH, packaged_model

NAMES = ("tiny", "smollm2", "smollm2-wide")
# k-quants and i-quants take rows of 256 values; 192 of each block are the model's own
_BLOCK, _OWN = 256, 192


def model_folder(name: str, place: Path) -> Path:
    """The folder of a model of NAMES; written below `place` unless it is the built-in one."""
    if name == "tiny":
        return BUILT_IN_PATH.with_suffix("")
    path = packaged_model("smollm2").path
    source = open_gguf_source(path)
    model = transformers_model(path, source.spec)
    folder = place / name
    kept: Any = widened(model) if name == "smollm2-wide" else model
    kept.to(torch.float16).save_pretrained(folder)
    tokenizer = source.load_tokenizer()
    (folder / "tokenizer.json").write_text(_tokenizer_json(tokenizer), encoding="utf-8")
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    settings = special | {"tokenizer_class": "GPT2Tokenizer", "chat_template": source.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@torch.no_grad()
def widened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same function with rows whose lengths are multiples of 256, which every type of llama.cpp
    divides.

    The hidden size grows by a third: each block of 256 has 192 of the model's values and 64 zeros,
    and the norms' weights and epsilon undo the change of the mean square. Heads of zeros fill the
    attention. The feed-forward size must be a multiple of 256.
    """
    old: Any = model.config
    hidden = old.hidden_size // _OWN * _BLOCK
    ratio = hidden / old.hidden_size
    shared = old.num_attention_heads // old.num_key_value_heads
    heads = -(-old.num_attention_heads * old.head_dim // _BLOCK) * _BLOCK // old.head_dim
    config = LlamaConfig(
        **old.to_dict()
        | {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // shared,
            "rms_norm_eps": old.rms_norm_eps / ratio,
        }
    )
    wide = LlamaForCausalLM(config)
    places = torch.arange(old.hidden_size) // _OWN * _BLOCK + torch.arange(old.hidden_size) % _OWN
    own = dict(model.named_parameters())
    for name, target in wide.named_parameters():
        target.zero_()
        kind, values = name.split(".")[-2], own[name]
        if kind.endswith("norm"):
            target[places] = values / math.sqrt(ratio)
        elif kind in ("o_proj", "down_proj"):
            target[places, : values.shape[1]] = values
        else:
            target[: len(values), places] = values
    return wide


def _tokenizer_json(tokenizer: HfTokenizer) -> str:
    """The tokenizer's file with the steps of the model's own: digits one by one, then GPT-2's."""
    library = tokenizer._tokenizer  # it has no public name
    library.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    return library.to_str()
