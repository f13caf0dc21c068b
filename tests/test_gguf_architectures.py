"""Converted models of every architecture: llama.cpp computes what transformers does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_configs import write_config
from hf_folders import DATA
from llama_files import LlamaFile
from quant_models import CTX, MODELS, model_folder
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gguf_model import llama_cpp_logits
from localgen.backends.cuda.model.source import open_gguf_source
from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.config import read_hf_config
from localgen.quant.gguf.convert import convert_to_gguf

GREEDY_TOKENS, PROMPTS = 20, 3
# minimum distance of the two best logits, in standard deviations of all logits
SURE = 0.03


@dataclass(frozen=True)
class Pair:
    name: str
    folder: Path
    gguf: Path
    theirs: Any
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = model_folder(request.param, tmp_path_factory.mktemp("model") / "hf")
    path = folder.parent / "model.gguf"
    convert_to_gguf(folder, path, "F16")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Pair(request.param, folder, path, theirs, tokenizer)


def answers(pair: Pair) -> Iterator[tuple[str, list[int], list[int]]]:
    """Prompts, their tokens, and transformers' greedy answers where no step is a near tie."""
    words = re.sub(r"<\|\w+\|>", "", (DATA / "heldout.txt").read_text()).split()
    for start in range(0, len(words), 5):
        text = " ".join(words[start : start + 10])
        prompt = pair.tokenizer.encode(text, add_special_tokens=False).ids
        tokens = torch.tensor([prompt])
        answer: list[int] = []
        for _ in range(GREEDY_TOKENS):
            logits = pair.theirs(tokens).logits[0, -1]
            best = logits.topk(2)
            if best.values[0] - best.values[1] < SURE * logits.std():
                break
            answer.append(int(best.indices[0]))
            tokens = torch.cat([tokens, best.indices[None, :1]], 1)
        else:
            yield text, prompt, answer


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(
    pair: Pair, open_model: Callable[..., LlamaFile]
) -> None:
    model = open_model(pair.gguf)
    compared = 0
    for text, prompt, expected in answers(pair):
        assert model.tokenize(text) == prompt
        answer = model.greedy_tokens(prompt, GREEDY_TOKENS, CTX)
        assert answer == expected[: len(answer)]
        assert len(answer) > GREEDY_TOKENS // 2
        compared += 1
        if compared == PROMPTS:
            break
    assert compared == PROMPTS


def their_logits(pair: Pair, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = pair.theirs(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    """In float32, over a text longer than Gemma's windows."""
    convert_to_gguf(pair.folder, tmp_path / "f32.gguf", "F32")
    vocab = read_hf_config(pair.folder).vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens: list[int] = torch.randint(3, vocab, (90,), generator=generator).tolist()
    ours = llama_cpp_logits(tmp_path / "f32.gguf", tokens, CTX)
    theirs = their_logits(pair, tokens)
    assert theirs.abs().max() > 0.5
    # its GELU is a table of float16 values
    tolerance = 6e-3 if pair.name.startswith("gemma") else 2e-5
    assert float((ours - theirs).abs().max()) < tolerance
    halves = llama_cpp_logits(pair.gguf, tokens, CTX)
    assert float((halves - theirs).abs().max()) < 0.02


# fields that the two formats express differently
REWORDED = {"rope", "norm_eps", "architecture", "attn_scale", "sliding_windows"}


def test_our_own_engine_reads_the_same_model(pair: Pair) -> None:
    ours, theirs = open_gguf_source(pair.gguf).spec, read_hf_config(pair.folder)
    for field in dataclasses.fields(ours):
        if field.name not in REWORDED:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-6)
    if pair.name.startswith(("gemma", "phi")):
        assert ours.sliding_windows == theirs.sliding_windows
    for length in (64, 512):
        for table, other in zip(
            ours.rope.cos_sin_table(length), theirs.rope.cos_sin_table(length), strict=True
        ):
            torch.testing.assert_close(table, other, rtol=0, atol=3e-5)


def quantized(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 16}}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", quantized("awq"), "already quantized (awq)"),
        ("gemma2", {"attn_logit_softcapping": None}, "Gemma 2 without soft caps"),
        ("gemma2", {"tie_word_embeddings": False}, "Gemma 2 with a head of its own"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("qwen3", {"attention_bias": True}, "attention_bias in this architecture"),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 for a hidden size of 64"),
        ("qwen3 moe", {"norm_topk_prob": False}, "norm_topk_prob false"),
        ("llama", {"partial_rotary_factor": 0.5}, "8 rotary dimensions of 16"),
        ("qwen3 yarn", {"attention_bias": False}, "betas 16 and 2"),
        (
            "qwen2 yarn",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
            "YaRN with truncate false",
        ),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(
    name: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "hf", name)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadFailed) as caught:
        convert_to_gguf(folder, tmp_path / "model.gguf")
    assert expected in caught.value.message
    assert "config.json" in caught.value.message
    assert not (tmp_path / "model.gguf").exists()
