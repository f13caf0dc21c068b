"""Logits of the CUDA backend's decoder on a CPU, against transformers and llama.cpp."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.agreement_parts.compared_model import ComparedModel
from benchmarks.forced_output import HELD_OUT
from benchmarks.gguf_model import llama_cpp_logits, our_logits, widen
from localgen.backends.formats.architecture.model_spec import ModelSpec

# logits reach about 30; both compute in float32, in another order
_MOST_APART = 1e-3
# llama.cpp rounds activations to 8 bits before each product
_MOST_MNATS, _LEAST_SAME = 5.0, 0.95
_LENGTH_STEP = 256


def logits(model: ComparedModel, length: int) -> None:
    """Compare the logits at `length` positions of a real text."""
    text = HELD_OUT.read_text(encoding="utf-8")
    ids = model.source.load_tokenizer().encode(text[: 8 * length])[:length]
    ctx = -(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP
    spec = model.source.spec
    weights = model.source.load_weights("cpu", torch.float32)
    ours = our_logits(spec, weights, ids, ctx)
    _close(model, "transformers", ours, transformers_logits(model.path, spec, ids))
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        widen(model.path, wide)
        _close(model, "llama.cpp, weights in float32", ours, llama_cpp_logits(wide, ids, ctx))
    theirs = llama_cpp_logits(model.path, ids, ctx)
    report, name = model.report, "llama.cpp, activations in 8 bits"
    nats = functional.kl_div(
        theirs.log_softmax(-1), ours.log_softmax(-1), reduction="batchmean", log_target=True
    )
    report.most(report.add("KL divergence", name, "mnats", [1e3 * float(nats)]), _MOST_MNATS)
    report.least(report.add("same best token", name, "", [_same_best(ours, theirs)]), _LEAST_SAME)


def _close(model: ComparedModel, name: str, ours: Tensor, theirs: Tensor) -> None:
    """Report the largest difference of float32 logits, and the share of equal best tokens."""
    report = model.report
    apart = float((ours - theirs).abs().max())
    report.most(report.add("logits apart, at most", name, "", [apart]), _MOST_APART)
    report.least(report.add("same best token", name, "", [_same_best(ours, theirs)]), 1.0)


def _same_best(ours: Tensor, theirs: Tensor) -> float:
    """Share of the positions where both have the same most likely token."""
    return float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())


@torch.no_grad()
def transformers_logits(path: Path, spec: ModelSpec, ids: list[int]) -> Tensor:
    """Logits of transformers' Llama in float32."""
    found: Tensor = transformers_model(path, spec)(torch.tensor([ids])).logits[0]
    return found


@torch.no_grad()
def transformers_model(path: Path, spec: ModelSpec) -> LlamaForCausalLM:
    """transformers' Llama in float32, with weights of a GGUF file read by the gguf package."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    model = LlamaForCausalLM(_config(reader, spec, tied="output.weight" not in tensors))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, (".weight",))
        assert stored is not None
        tensor = tensors[stored]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in stored or "attn_k" in stored:
            # llama.cpp's rotary pairs are neighbours, transformers' are half a head apart
            pairs = values.view(-1, spec.head_dim // 2, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        parameter.copy_(values)
    return model  # its dropout is 0


def _config(reader: gguf.GGUFReader, spec: ModelSpec, *, tied: bool) -> LlamaConfig:
    """Model configuration, from metadata read by the gguf package."""

    def read(key: str) -> float:
        field = reader.get_field(f"llama.{key}")
        assert field is not None
        return float(field.contents())

    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=int(read("embedding_length")),
        intermediate_size=int(read("feed_forward_length")),
        num_hidden_layers=int(read("block_count")),
        num_attention_heads=int(read("attention.head_count")),
        num_key_value_heads=int(read("attention.head_count_kv")),
        max_position_embeddings=int(read("context_length")),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("rope.freq_base")},
        tie_word_embeddings=tied,
    )
