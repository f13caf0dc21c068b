"""Write a Llama checkpoint with random weights in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.shapes import config_of
from benchmarks.random_vocabulary import LEAST, random_vocabulary
from localgen.backends.formats.architecture.model_spec import ModelSpec

_SHARD_BYTES = 4 << 30
_STD = 0.02


def write_checkpoint(folder: Path, spec: ModelSpec, device: Device) -> int:
    """Write sharded bfloat16 weights and a tokenizer; return the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(spec, "bfloat16")), encoding="utf-8")
    _write_tokenizer(folder, spec.vocab_size)
    generator = torch.Generator(device.torch).manual_seed(0)
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    written = held = 0
    for name, shape in shapes(spec):
        values = torch.empty(shape, device=device.torch, dtype=torch.bfloat16)
        # norm weights around 1, as in trained models
        values.normal_(mean=float(len(shape) == 1), std=_STD, generator=generator)
        shard[name] = values.cpu()
        held += values.nbytes
        if held >= _SHARD_BYTES:
            files |= _write(folder, shard, len(set(files.values())))
            written, held, shard = written + held, 0, {}
    files |= _write(folder, shard, len(set(files.values())))
    index = {"metadata": {"total_size": written + held}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return written + held


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level BPE of this size, which loads as slowly as a real one."""
    words = random_vocabulary(max(vocab, LEAST))
    tokens = {token: number for number, token in enumerate(words.tokens[:vocab])}
    merges = [(left, right) for left, right in map(str.split, words.merges)]
    known = [pair for pair in merges if "".join(pair) in tokens]
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=known))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write(folder: Path, shard: dict[str, Tensor], number: int) -> dict[str, str]:
    if not shard:
        return {}
    name = f"model-{number:05}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(shard, name)


def shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a Llama's tensors."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)
