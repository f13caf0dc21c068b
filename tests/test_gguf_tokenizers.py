"""Converted tokenizers: llama.cpp gives the tokens of Hugging Face's tokenizers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hf_folders import DATA, edit
from llama_files import LlamaFile
from quant_tokenizers import BYTE_LEVEL, PIECES, VARIED, byte_level, pieces, write_tokenizer
from tokenizers import Tokenizer

from localgen.backends.errors import LoadFailed
from localgen.quant.gguf.convert import convert_to_gguf

# llama.cpp mistakes the case of letters outside of ASCII
BY_CASE = {"tekken", "gpt-4o"}
# text that llama.cpp splits in another way
OTHERWISE = {
    "llama 2": re.compile("(?!)"),
    "mistral": re.compile("^ |<[|]endo"),  # Metaspace: a space before the first text if it has none
    "gemma": re.compile("( |\n){5}"),  # more than the longest token of them
}


def converted(folder: Path, tokenizer: dict[str, Any], **settings: Any) -> Path:
    write_tokenizer(folder, tokenizer, **settings)
    convert_to_gguf(folder, folder / "model.gguf")
    return folder / "model.gguf"


def texts() -> list[str]:
    text = unicodedata.normalize("NFC", (DATA / "heldout.txt").read_bytes().decode())
    return [*VARIED, *text.splitlines(keepends=True), text]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_tokens_equal_hugging_face(
    pre: str, folder: Path, open_model: Callable[..., LlamaFile]
) -> None:
    model = open_model(converted(folder, byte_level(pre), eos_token="<|im_end|>"), vocab_only=True)
    assert model.metadata("tokenizer.ggml.model") == "gpt2"
    assert model.metadata("tokenizer.ggml.pre") == pre
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    compared = 0
    for text in texts():
        if pre not in BY_CASE or text.isascii():
            expected = reference.encode(text, add_special_tokens=False).ids
            assert model.tokenize(text) == expected, text[:100]
            compared += 1
    assert compared > 20


def test_what_matches_is_kept_or_the_rest_removed(
    folder: Path, open_model: Callable[..., LlamaFile]
) -> None:
    """Two equivalent forms of a pre-tokenizer, as in Phi-4; and no normalizers at all."""
    tokenizer = byte_level("smaug-bpe")
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": []}
    tokenizer["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    model = open_model(converted(folder, tokenizer, eos_token="<|im_end|>"), vocab_only=True)
    assert model.metadata("tokenizer.ggml.pre") == "smaug-bpe"
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        assert model.tokenize(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", PIECES)
def test_sentencepiece_tokens_equal_hugging_face(
    name: str, folder: Path, open_model: Callable[..., LlamaFile]
) -> None:
    model = open_model(converted(folder, pieces(name), eos_token="</s>"), vocab_only=True)
    assert model.metadata("tokenizer.ggml.model") == "llama"
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        if not OTHERWISE[name].search(text):
            expected = reference.encode(text, add_special_tokens=False).ids
            assert model.tokenize(text) == expected, text[:100]
    used = {token for text in texts() for token in model.tokenize(text)}
    assert len(used) > 400


@pytest.mark.parametrize("name", PIECES)
def test_chats_of_pieces(name: str, folder: Path, open_model: Callable[..., LlamaFile]) -> None:
    """Special tokens between texts. Metaspace's `first` adds a space before the first text only."""
    template = "{{ messages }}"
    path = converted(folder, pieces(name), eos_token="</s>", chat_template=template)
    model = open_model(path, vocab_only=True)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|user|>What is 17 + 25?<|end|><|assistant|>It is\n\n  42<|end|>"
    assert model.tokenize(text) == reference.encode(text, add_special_tokens=False).ids
    assert model.metadata("tokenizer.chat_template") == template


@pytest.mark.parametrize(
    ("folder_name", "written"), [("Phi-3-x", "Phi-3-x"), ("mine", "mine (Phi-3)")]
)
def test_phi_3_strips_white_space_after_special_tokens(
    folder_name: str, written: str, folder: Path, open_model: Callable[..., LlamaFile]
) -> None:
    """llama.cpp decides by the model's name."""
    tokenizer = pieces("llama 2")
    for added in tokenizer["added_tokens"]:
        added["rstrip"] = added["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    edit(folder / "config.json", architectures=["Phi3ForCausalLM"], model_type="phi3")
    fuse(folder)
    folder = folder.rename(folder.with_name(folder_name))
    model = open_model(converted(folder, tokenizer, eos_token="<|end|>"), vocab_only=True)
    assert model.metadata("general.name") == written
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("<|user|>\nHello<|end|>\n <|assistant|> ", "<s> a<|endoftext|> b</s> c"):
        assert model.tokenize(text) == reference.encode(text, add_special_tokens=False).ids


def fuse(folder: Path) -> None:
    """The built-in model with Phi-3's fused projections."""
    from hf_folders import read_safetensors, write_safetensors

    tensors = read_safetensors(folder / "model.safetensors")
    groups = {"self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    groups["mlp.gate_up_proj"] = ["gate_proj", "up_proj"]
    for layer in range(json.loads((folder / "config.json").read_text())["num_hidden_layers"]):
        for fused, names in groups.items():
            block = f"model.layers.{layer}.{fused.split('.')[0]}."
            parts = [tensors.pop(f"{block}{name}.weight") for name in names]
            shape = [sum(part[1][0] for part in parts), parts[0][1][1]]
            raw = b"".join(part[2] for part in parts)
            tensors[f"model.layers.{layer}.{fused}.weight"] = (parts[0][0], shape, raw)
    write_safetensors(folder / "model.safetensors", tensors)


def test_special_tokens_of_pieces(folder: Path, open_model: Callable[..., LlamaFile]) -> None:
    tokenizer = pieces("gemma")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}],
    }
    end = tokenizer["model"]["vocab"]["<|user|>"]
    edit(folder / "generation_config.json", eos_token_id=[1, end])
    path = converted(
        folder, tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token={"content": "<pad>"}
    )
    model = open_model(path, vocab_only=True)
    vocab = model.vocab
    assert llama_cpp.llama_vocab_bos(vocab) == 2
    assert llama_cpp.llama_vocab_eos(vocab) == 1
    assert llama_cpp.llama_vocab_pad(vocab) == 0
    assert llama_cpp.llama_vocab_get_add_bos(vocab)
    assert llama_cpp.llama_vocab_is_eog(vocab, end)
    assert model.metadata("tokenizer.ggml.unknown_token_id") == "3"
    assert model.tokenize("a", first=True)[0] == 2
    attrs = [llama_cpp.llama_vocab_get_attr(vocab, token) for token in (1, 3, 4, 10, 400, 4000)]
    assert attrs == [
        llama_cpp.LLAMA_TOKEN_ATTR_CONTROL,
        llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN,
        llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED,
        llama_cpp.LLAMA_TOKEN_ATTR_BYTE,
        llama_cpp.LLAMA_TOKEN_ATTR_NORMAL,
        llama_cpp.LLAMA_TOKEN_ATTR_UNUSED,
    ]


def learned_merges(tokenizer: dict[str, Any]) -> None:
    """One merge per token, as the tokenizers library learns them."""
    seen: dict[str, list[str]] = {}
    for merge in tokenizer["model"]["merges"]:
        seen.setdefault("".join(merge), merge)
    tokenizer["model"]["merges"] = list(seen.values())


def no_byte(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["<0xZZ>"] = vocab.pop("<0x41>")


def unigram(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["type"] = "Unigram"


def strip(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"]["normalizers"].append({"type": "Strip"})


def words(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}


def unlike(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "split": True}


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (learned_merges, "pairs that make a token are not merges"),
        (no_byte, "has no token <0x41>"),
        (unigram, "only BPE tokenizers can be converted, this is Unigram"),
        (strip, "does not support normalization by Sequence Prepend Replace Strip and nothing"),
        (words, "does not support normalization by Sequence Prepend Replace and Whitespace"),
        (unlike, "does not support normalization by nothing and Metaspace"),
    ],
)
def test_unsupported_sentencepiece_tokenizers_are_rejected(
    damage: Callable[[dict[str, Any]], None], expected: str, folder: Path
) -> None:
    tokenizer = pieces("llama 2")
    damage(tokenizer)
    with pytest.raises(LoadFailed) as caught:
        converted(folder, tokenizer, eos_token="</s>")
    assert expected in caught.value.message
    assert "tokenizer.json" in caught.value.message
    assert not (folder / "model.gguf").exists()
