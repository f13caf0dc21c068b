"""Metadata keys of a GGUF file, and checks for models that GGUF cannot describe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import MODEL_ARCH

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.families import FAMILIES, conversion_obstacle
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.rope import Llama3Scaling, LongRopeScaling, YarnScaling
from localgen.backends.formats.gguf.rope import rope_metadata
from localgen.backends.sampling_params import SAMPLERS
from localgen.quant.gguf.names import gguf_model_arch
from localgen.quant.gguf.vocabulary import GgufVocabulary


def check_convertible(path: Path, spec: ModelSpec) -> None:
    """Raise LoadFailed for a model that llama.cpp cannot compute. path: its config.json."""
    if spec.quant is not None:
        raise LoadFailed(
            f"{path}: the model is already quantized ({spec.quant.method}): convert the original"
        )
    unknown = conversion_obstacle(spec)
    if unknown is not None:
        raise LoadFailed(f"{path}: localgen cannot convert {unknown} to GGUF")
    obstacle = _unsupported_feature(spec) or _unsupported_rope_feature(spec)
    if obstacle is not None:
        raise LoadFailed(f"{path}: llama.cpp cannot compute {obstacle}")


def _unsupported_feature(spec: ModelSpec) -> str | None:
    kind = gguf_model_arch(spec)
    if kind is MODEL_ARCH.GEMMA2:
        if spec.attn_softcap is None or spec.logit_softcap is None:
            return "Gemma 2 without soft caps"
        if not spec.tied_embeddings:
            return "Gemma 2 with a head of its own"
    elif spec.attn_softcap is not None:
        return "attn_logit_softcapping"
    if spec.out_bias and kind is not MODEL_ARCH.LLAMA:
        return "attention_bias in this architecture"
    if (
        kind in (MODEL_ARCH.QWEN2, MODEL_ARCH.PHI3)
        and spec.num_heads * spec.head_dim != spec.hidden_size
    ):
        return f"{spec.num_heads} heads of {spec.head_dim} for a hidden size of {spec.hidden_size}"
    if spec.moe is not None and not spec.moe.normalize_topk:
        return "norm_topk_prob false"
    return None


def _unsupported_rope_feature(spec: ModelSpec) -> str | None:
    kind, scaling = gguf_model_arch(spec), spec.rope.scaling
    if kind is MODEL_ARCH.LLAMA and spec.rope.dim != spec.head_dim:
        return f"{spec.rope.dim} rotary dimensions of {spec.head_dim}"
    if spec.local_rope is not None and spec.local_rope.scaling is not None:
        return "stretched positions in layers with a window"
    match scaling:
        case Llama3Scaling() if kind is not MODEL_ARCH.LLAMA:
            return "rope type llama3 in another model than Llama"
        case LongRopeScaling() if kind not in (MODEL_ARCH.LLAMA, MODEL_ARCH.PHI3):
            return "rope type longrope in another model than Llama and Phi"
        case YarnScaling() if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
            return f"YaRN with betas {scaling.beta_fast:g} and {scaling.beta_slow:g}, not 32 and 1"
        case YarnScaling(truncate=False):
            return "YaRN with truncate false"
    return None


def add_model_keys(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write the architecture's hyperparameters."""
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    adders: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in rope_metadata(spec).items():
        adders[type(value)](f"{writer.arch}.{key}", value)
    _add_windows(writer, spec)
    if spec.attn_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attn_softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.moe is not None:
        writer.add_expert_count(spec.moe.num_experts)
        writer.add_expert_used_count(spec.moe.top_k)
        writer.add_expert_feed_forward_length(spec.moe.intermediate_size)


def _add_windows(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    family = FAMILIES[spec.architecture]
    if not family.gguf_windows:
        return  # llama.cpp supports none for these architectures
    window = max((window for window in spec.sliding_windows if window is not None), default=0)
    writer.add_sliding_window(window)
    if window and family.windows == "alternating":
        writer.add_sliding_window_pattern([window is not None for window in spec.sliding_windows])


def add_vocabulary_keys(writer: gguf.GGUFWriter, vocabulary: GgufVocabulary) -> None:
    """Write the tokenizer, its special tokens and the chat template."""
    writer.add_tokenizer_model(vocabulary.tokenizer_model)
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    else:
        writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.add_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    roles = {
        writer.add_bos_token_id: vocabulary.bos_id,
        writer.add_pad_token_id: vocabulary.pad_id,
        writer.add_unk_token_id: vocabulary.unk_id,
    }
    # llama.cpp stops at any of these three
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    roles |= dict(zip(ends, vocabulary.eos_ids, strict=False))
    for add, token_id in roles.items():
        if token_id is not None:
            add(token_id)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def add_sampling_keys(writer: gguf.GGUFWriter, path: Path, generation: dict[str, Any]) -> None:
    """Write the model's sampling defaults; do_sample false means greedy, other values are ignored.

    generation: contents of generation_config.json. Raises LoadFailed if a value is not a number.
    """
    if generation.get("do_sample") is False:
        writer.add_sampling_temp(0.0)
        return
    for sampler in SAMPLERS:
        key, name = sampler.hf_key, f"general.sampling.{sampler.gguf_key}"
        if not key or generation.get(key) is None:
            continue
        try:
            if sampler.value_type is int:
                writer.add_int32(name, int(generation[key]))
            else:
                writer.add_float32(name, float(generation[key]))
        except (TypeError, ValueError):
            raise LoadFailed(f"{path}: {key} is {generation[key]!r}, not a number") from None
