"""GGUF files made from the built-in model: changed, damaged, or of another architecture."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models import TINY_GGUF

FLOAT32, STRING = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
UINT32, ARRAY = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.ARRAY
Change = tuple[Any, gguf.GGUFValueType] | None


def rewrite(target: Path, changes: Mapping[str, Change], **writer_options: Any) -> Path:
    """The built-in model with metadata replaced, added or, for None, removed."""
    reader = gguf.GGUFReader(TINY_GGUF)
    writer = _writer(target, reader, changes, "llama", writer_options)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return _write(writer, target)


def infill(target: Path, texts: Sequence[str], **metadata: int) -> Path:
    """The built-in model with control tokens of these texts at the end of its vocabulary.

    metadata: tokenizer.ggml.NAME_token_id for fim_pre, fim_suf, …
    """
    fields, count = gguf.GGUFReader(TINY_GGUF).fields, len(texts)
    tokens = fields["tokenizer.ggml.tokens"].contents()[:-count] + list(texts)
    types = fields["tokenizer.ggml.token_type"].contents()[:-count]
    changes: dict[str, Change] = {
        "tokenizer.ggml.tokens": (tokens, ARRAY),
        "tokenizer.ggml.token_type": (types + [int(gguf.TokenType.CONTROL)] * count, ARRAY),
        # the last merges make the last tokens
        "tokenizer.ggml.merges": (fields["tokenizer.ggml.merges"].contents()[:-count], ARRAY),
    }
    ids = {f"tokenizer.ggml.{name}_token_id": (each, UINT32) for name, each in metadata.items()}
    return rewrite(target, changes | ids)


def bert(target: Path, pooling: int | None = None) -> Path:
    """A tiny embedding model with the built-in model's vocabulary.

    pooling: LLAMA_POOLING_TYPE_*; None: not set in the file.
    """
    width, vocab, context = 32, 4096, 64
    changes: dict[str, Change] = {
        "bert.context_length": (context, UINT32),
        "bert.embedding_length": (width, UINT32),
        "bert.feed_forward_length": (width, UINT32),
        "bert.block_count": (1, UINT32),
        "bert.attention.head_count": (2, UINT32),
        "bert.attention.layer_norm_epsilon": (1e-6, FLOAT32),
        "bert.attention.causal": (False, gguf.GGUFValueType.BOOL),
        "tokenizer.ggml.token_type_count": (1, UINT32),
    }
    if pooling is not None:
        changes["bert.pooling_type"] = (pooling, UINT32)
    writer = _writer(target, gguf.GGUFReader(TINY_GGUF), changes, "bert", {})
    square, column = (width, width), (width,)
    shapes = {
        "token_embd.weight": (vocab, width),
        "position_embd.weight": (context, width),
        "token_embd_norm.weight": column,
        "token_embd_norm.bias": column,
    }
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
        shapes |= {f"blk.0.{name}.weight": square, f"blk.0.{name}.bias": column}
    for name in ("attn_output_norm", "layer_output_norm"):
        shapes |= {f"blk.0.{name}.weight": column, f"blk.0.{name}.bias": column}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32))
    return _write(writer, target)


def short_convolutions(target: Path) -> Path:
    """A tiny LFM2: some layers have attention, the others keep a recurrent state."""
    width, kv_heads = 64, [0, 2, 0, 1]
    changes: dict[str, Change] = {
        "lfm2.context_length": (512, UINT32),
        "lfm2.embedding_length": (width, UINT32),
        "lfm2.feed_forward_length": (96, UINT32),
        "lfm2.block_count": (len(kv_heads), UINT32),
        "lfm2.attention.head_count": (2, UINT32),
        "lfm2.attention.layer_norm_rms_epsilon": (1e-5, FLOAT32),
        "lfm2.shortconv.l_cache": (3, UINT32),
        "lfm2.vocab_size": (4096, UINT32),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (4096, width), "token_embd_norm": (width,)}
    for layer, heads in enumerate(kv_heads):
        names = {"shortconv.conv": (width, 3), "shortconv.in_proj": (3 * width, width)}
        names |= {"shortconv.out_proj": (width, width)}
        if heads:
            names = {"attn_q": (width, width), "attn_output": (width, width)}
            names |= dict.fromkeys(("attn_k", "attn_v"), (32 * heads, width))
            names |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (32,))  # type: ignore[arg-type]
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (names | _mlp(width)).items()}
    return _random(target, "lfm2", changes, shapes, {"lfm2.attention.head_count_kv": kv_heads})


def latent_attention(target: Path) -> Path:
    """A tiny DeepSeek: caches one key for all heads and no values."""
    width, rank, rope, q_rank, heads, head = 64, 32, 32, 32, 2, 32
    changes: dict[str, Change] = {
        "context_length": (512, UINT32),
        "embedding_length": (width, UINT32),
        "feed_forward_length": (96, UINT32),
        "block_count": (2, UINT32),
        "leading_dense_block_count": (2, UINT32),
        "attention.head_count": (heads, UINT32),
        "attention.head_count_kv": (1, UINT32),
        "attention.layer_norm_rms_epsilon": (1e-5, FLOAT32),
        "attention.q_lora_rank": (q_rank, UINT32),
        "attention.kv_lora_rank": (rank, UINT32),
        "attention.key_length": (rank + rope, UINT32),
        "attention.value_length": (rank, UINT32),
        "attention.key_length_mla": (head + rope, UINT32),
        "attention.value_length_mla": (head, UINT32),
        "rope.dimension_count": (rope, UINT32),
        "expert_feed_forward_length": (16, UINT32),
        "expert_shared_count": (0, UINT32),
        "vocab_size": (4096, UINT32),
    }
    layer = {
        "attn_q_a": (q_rank, width),
        "attn_q_a_norm": (q_rank,),
        "attn_q_b": (heads * (head + rope), q_rank),
        "attn_kv_a_mqa": (rank + rope, width),
        "attn_kv_a_norm": (rank,),
        "attn_k_b": (heads, rank, head),
        "attn_v_b": (heads, head, rank),
        "attn_output": (width, heads * head),
        **_mlp(width),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (4096, width), "output_norm": (width,)}
    shapes |= {f"blk.{at}.{name}": shape for at in range(2) for name, shape in layer.items()}
    named = {f"deepseek2.{key}": value for key, value in changes.items()}
    return _random(target, "deepseek2", named, shapes)


def _mlp(width: int) -> dict[str, tuple[int, ...]]:
    wide = dict.fromkeys(("ffn_gate", "ffn_up"), (96, width))
    return {**wide, "ffn_down": (width, 96), "ffn_norm": (width,), "attn_norm": (width,)}


def _random(
    target: Path,
    architecture: str,
    changes: Mapping[str, Change],
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Mapping[str, list[int]] = {},
) -> Path:
    """A model with random weights and the built-in model's vocabulary."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return with_weights(target, architecture, changes, weights, arrays)


def with_weights(
    target: Path,
    architecture: str,
    changes: Mapping[str, Change],
    weights: Mapping[str, Any],
    arrays: Mapping[str, Sequence[Any]] = {},
) -> Path:
    """A model with these weights and the built-in model's vocabulary. weights: without `.weight`.

    arrays: more metadata.
    """
    writer = _writer(target, gguf.GGUFReader(TINY_GGUF), changes, architecture, {})
    for key, values in arrays.items():
        writer.add_array(key, values)
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", np.asarray(weight, np.float32))
    return _write(writer, target)


def _writer(
    target: Path,
    reader: gguf.GGUFReader,
    changes: Mapping[str, Change],
    architecture: str,
    options: dict[str, Any],
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(target, architecture, **options)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in changes:
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, change in changes.items():
        if change:
            writer.add_key_value(key, *change)
    return writer


def _write(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def patched(target: Path, changes: Mapping[int, bytes]) -> Path:
    """The built-in model with bytes replaced at these offsets."""
    content = bytearray(TINY_GGUF.read_bytes())
    for offset, new in changes.items():
        content[offset : offset + len(new)] = new
    target.write_bytes(content)
    return target


def with_number(target: Path, key: str, value: float) -> Path:
    """The built-in model with a uint32 or float32 of its metadata replaced."""
    setting = gguf.GGUFReader(TINY_GGUF).fields[key]
    (kind,) = setting.types
    # length of the key, the key, its type; then the value
    offset = setting.offset + 8 + len(key) + 4
    new = struct.pack("<f", value) if kind == FLOAT32 else u32(int(value))
    return patched(target, {offset: new})


def with_nan(target: Path, *names: str) -> Path:
    """The built-in model with all values of these tensors replaced by NaN."""
    tensors = [t for t in gguf.GGUFReader(TINY_GGUF).tensors if t.name in names]
    assert len(tensors) == len(names)
    # all bits set is a NaN in F16 and in F32
    return patched(target, {int(t.data_offset): b"\xff" * int(t.n_bytes) for t in tensors})


def header_bytes() -> tuple[int, int, int]:
    """Offsets in the built-in model of the vocabulary, the tensor list and the tensors."""
    reader = gguf.GGUFReader(TINY_GGUF)
    vocabulary = reader.fields["tokenizer.ggml.tokens"].offset
    return vocabulary, reader.tensors[0].field.offset, reader.data_offset


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)
