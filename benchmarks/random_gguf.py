"""Random Q4_K_M models of real shapes: speed does not depend on trained weights.

python -m benchmarks.random_gguf [--shape 1b|draft|quick] writes one to the user's cache folder in
seconds and prints its path.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import platformdirs
from gguf import GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray

from benchmarks.random_vocabulary import (
    CHAT_TEMPLATE,
    NUM_SPECIAL,
    RandomVocabulary,
    random_vocabulary,
)

REVISION = 1  # of the file's contents; part of the cached file's name
BLOCK_WEIGHTS = 256
Q4_K, Q6_K, F32 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F32
# the q values of a block are uniform; d follows from their standard deviation and the scales below
_Q4_SPREAD, _Q6_SPREAD = np.sqrt((16**2 - 1) / 12), np.sqrt((64**2 - 1) / 12)
_Q4_SCALES, _Q6_SCALES = range(16, 64), range(32, 128)
EMBEDDING_STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama model with tied embeddings."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    ctx: int


SHAPES = {
    "1b": LlamaShape("1b", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072),  # Llama-3.2-1B
    "draft": LlamaShape("draft", 6, 768, 2048, 12, 4, 64, 128_256, 131_072),  # a draft model for it
    "quick": LlamaShape("quick", 2, 256, 512, 4, 2, 64, 2048, 8192),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. shape: [rows, weights per row], or [size] of a norm."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType


def cached(shape: LlamaShape) -> Path:
    """Return the path of the model in the user's cache folder; write it if missing."""
    folder = platformdirs.user_cache_path("localgen", appauthor=False) / "benchmarks"
    path = folder / f"random-{shape.name}-q4_k_m-r{REVISION}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(shape, path)
    return path


def write(shape: LlamaShape, target: Path, *, seed: int = 0) -> None:
    """Write a random model to a temporary file, then rename it to `target`."""
    vocabulary = random_vocabulary(shape.vocab)
    planned = list(tensors(shape))
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _add_settings(writer, shape)
    _add_vocabulary(writer, vocabulary)
    for tensor in planned:
        quantized = tensor.type is not F32
        stored = gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type)
        writer.add_tensor_info(
            tensor.name,
            stored if quantized else tensor.shape,
            np.dtype(np.uint8 if quantized else np.float32),
            num_bytes(tensor),
            raw_dtype=tensor.type,
        )
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(seed)
        for tensor in planned:
            writer.write_tensor_data(_random(rng, tensor, vocabulary))
        writer.close()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def tensors(shape: LlamaShape) -> Iterator[GgufTensor]:
    """Yield the tensors of the file, with their types in llama.cpp's Q4_K_M."""
    keys, values = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    yield GgufTensor("token_embd.weight", (shape.vocab, shape.hidden), Q6_K)
    for layer in range(shape.layers):
        finer = Q6_K if _more_bits(layer, shape.layers) else Q4_K
        prefix = f"blk.{layer}."
        yield GgufTensor(f"{prefix}attn_norm.weight", (shape.hidden,), F32)
        yield GgufTensor(f"{prefix}attn_q.weight", (keys, shape.hidden), Q4_K)
        yield GgufTensor(f"{prefix}attn_k.weight", (values, shape.hidden), Q4_K)
        yield GgufTensor(f"{prefix}attn_v.weight", (values, shape.hidden), finer)
        yield GgufTensor(f"{prefix}attn_output.weight", (shape.hidden, keys), Q4_K)
        yield GgufTensor(f"{prefix}ffn_norm.weight", (shape.hidden,), F32)
        yield GgufTensor(f"{prefix}ffn_gate.weight", (shape.ffn, shape.hidden), Q4_K)
        yield GgufTensor(f"{prefix}ffn_up.weight", (shape.ffn, shape.hidden), Q4_K)
        yield GgufTensor(f"{prefix}ffn_down.weight", (shape.hidden, shape.ffn), finer)
    yield GgufTensor("output_norm.weight", (shape.hidden,), F32)


def _more_bits(layer: int, layers: int) -> bool:
    """True if Q4_K_M stores attn_v and ffn_down of this layer in Q6_K."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def num_bytes(tensor: GgufTensor) -> int:
    """Return the size of the tensor in the file."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    return int(np.prod(tensor.shape)) // per_block * block_bytes


def _random(
    rng: np.random.Generator, tensor: GgufTensor, vocabulary: RandomVocabulary
) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Return the tensor's contents: uint8 [rows, bytes per row], or float32 ones for a norm."""
    if tensor.type is F32:
        return np.ones(tensor.shape, np.float32)
    rows, width = tensor.shape
    num_blocks = rows * width // BLOCK_WEIGHTS
    if tensor.name == "token_embd.weight":
        blocks = q6_k(rng, num_blocks, EMBEDDING_STD).reshape(rows, -1)
        silent = np.ones(rows, np.bool_)
        silent[list(vocabulary.spoken)] = False
        # their logit is 0, far below the largest: greedy sampling never selects them
        blocks[silent] = 0
        return blocks
    make = q4_k if tensor.type is Q4_K else q6_k
    return make(rng, num_blocks, width**-0.5).reshape(rows, -1)


def q4_k(rng: np.random.Generator, num_blocks: int, std: float) -> NDArray[np.uint8]:
    """Return random Q4_K blocks, uint8 [num_blocks, 144], of weights with mean 0 and about `std`.

    A block has f16 d, f16 dmin, eight 6-bit scales and minima in 12 bytes, 256 4-bit q;
    a weight is d·scale·q − dmin·minimum. Minimum = scale and dmin = 7.5·d center it.
    """
    blocks = rng.integers(0, 256, (num_blocks, 144), np.uint8)
    d = std / (_Q4_SPREAD * _rms(_Q4_SCALES))
    blocks[:, :4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
    scale = rng.integers(_Q4_SCALES.start, _Q4_SCALES.stop, (num_blocks, 8), np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    top = (high >> 4) << 6
    blocks[:, 4:8] = blocks[:, 8:12] = low | top
    blocks[:, 12:16] = (high & 15) | (high << 4)
    return blocks


def q6_k(rng: np.random.Generator, num_blocks: int, std: float) -> NDArray[np.uint8]:
    """Return random Q6_K blocks, uint8 [num_blocks, 210], of weights with mean about 0 and `std`.

    A block has 256 6-bit q (192 bytes), sixteen int8 scales, f16 d; a weight is
    d·scale·(q − 32).
    """
    blocks = rng.integers(0, 256, (num_blocks, 210), np.uint8)
    d = std / (_Q6_SPREAD * _rms(_Q6_SCALES))
    scale = rng.integers(_Q6_SCALES.start, _Q6_SCALES.stop, (num_blocks, 16), np.uint8)
    blocks[:, 192:208] = scale
    blocks[:, 208:] = np.array([d], np.float16).view(np.uint8)
    return blocks


def _rms(values: range) -> float:
    return float(np.sqrt(np.mean(np.square(np.arange(values.start, values.stop)))))


def _add_settings(writer: gguf.GGUFWriter, shape: LlamaShape) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"random {shape.name}")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: RandomVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(vocabulary.tokens)
    normal = len(vocabulary.tokens) - NUM_SPECIAL
    types = gguf.TokenType
    writer.add_token_types([types.NORMAL] * normal + [types.CONTROL] * NUM_SPECIAL)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.special_id("<|begin_of_text|>"))
    writer.add_eos_token_id(vocabulary.special_id("<|eot_id|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    """Write a random model if it is not cached, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    print(cached(SHAPES[parser.parse_args().shape]))


if __name__ == "__main__":
    main()
