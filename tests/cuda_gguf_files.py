"""Hugging Face folders as GGUF files, with the names and layouts of llama.cpp's converters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cuda_checkpoints import make
from cuda_configs import write_config
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file

from localgen.backends.formats.gguf.rope import interleave_rotary, rope_factor_tensors
from localgen.backends.formats.hf.config import read_hf_config

Array = NDArray[Any]
Changes = Mapping[str, Any]  # of metadata, by their whole keys; None leaves one out

_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.\d+\.(w\d|\w+_proj)\.weight")
_EXPERT_PARTS = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up"}


def tiny_folder(name: str, folder: Path, **changes: Any) -> Path:
    """A random model of a configuration in cuda_configs, with logits of order 1."""
    model = make(name, folder)
    for parameter in model.parameters():
        parameter.data *= 0.2
    model.save_pretrained(folder)
    return write_config(folder, name, **changes)  # as public files have it


def write_gguf(
    folder: Path,
    target: Path,
    kind: Kind = Kind.F32,
    changes: Changes | None = None,
    **options: Any,
) -> Path:
    """Write a model folder as GGUF.

    kind: type of the matrices whose rows it divides; others are F32. changes: metadata to replace;
    None removes a key.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, architecture, **options)
    own = {f"{architecture}.{key}": value for key, value in _metadata(config).items()}
    # llama.cpp accepts a file without a vocabulary, too
    vocabulary = {"tokenizer.ggml.model": "none"}
    for key, value in (own | vocabulary | dict(changes or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, values in _tensors(folder, config, architecture):
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        used = kind if values.ndim > 1 and fits else Kind.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads, gemma = config["num_attention_heads"], config["model_type"].startswith("gemma")
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    values = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window") if gemma else None,
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": config.get("rope_theta"),
        "rope.freq_base_swa": config.get("rope_local_base_freq"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if config["model_type"] == "gemma3_text":
        every = config.get("sliding_window_pattern", 6)
        layers = range(1, config["num_hidden_layers"] + 1)
        values["attention.sliding_window_pattern"] = [bool(layer % every) for layer in layers]
    if config["model_type"] == "phi3":
        values["attention.sliding_window"] = config.get("sliding_window") or 0
    return values | _scaling(config)


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or {}
    match rope.get("rope_type", rope.get("type")):
        case "linear" | "yarn" as kind:
            return {
                "rope.scaling.type": kind,
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": rope.get(
                    "original_max_position_embeddings"
                ),
            }
        case "longrope":
            trained = config["original_max_position_embeddings"]
            factor = config["max_position_embeddings"] / trained
            return {
                "rope.scaling.original_context_length": trained,
                "rope.scaling.attn_factor": math.sqrt(1 + math.log(factor) / math.log(trained)),
            }
    return {}


def _tensors(
    folder: Path, config: dict[str, Any], architecture: str
) -> Iterator[tuple[str, Array]]:
    experts: dict[str, list[Array]] = {}
    names = _INNER | (_GEMMA if architecture.startswith("gemma") else {})
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    tied = config.get("tie_word_embeddings", architecture.startswith("gemma"))
    # sorted, so that the experts of a layer come in order (there are fewer than ten)
    for name, values in sorted(load_file(folder / "model.safetensors").items()):
        if tied and name == "lm_head.weight":
            continue
        if expert := _EXPERT.fullmatch(name):
            layer, part = expert[1], _EXPERT_PARTS.get(expert[2], "down")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(values)
            continue
        stem, _, kind = name.rpartition(".")
        rotated = re.search(r"\.([qk])_proj$", stem)
        if rotated and architecture == "llama":
            values = interleave_rotary(values, heads[rotated[1]])
        if architecture.startswith("gemma") and stem.endswith("norm"):
            values = values + np.float32(1)
        yield f"{_stem(stem, names)}.{kind}", values
    yield from ((name, np.stack(parts)) for name, parts in experts.items())
    yield from _rope_factors(folder, config)


def _stem(stem: str, names: dict[str, str]) -> str:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    return _OUTER[stem] if match is None else f"blk.{match[1]}.{names[match[2]]}"


def _rope_factors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        yield from rope_factor_tensors(read_hf_config(folder).rope).items()
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            values = np.array(rope[f"{length}_factor"], np.float32)
            yield f"rope_factors_{length}.weight", values
