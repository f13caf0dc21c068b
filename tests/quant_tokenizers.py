"""Small tokenizers of every family that the converter supports, in the published layout."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

from hf_folders import BYTES, DATA, DIGITS, GPT2_BYTES, LLAMA3, QWEN2, TINY
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SPACE = "▁"
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
BY_SPACE = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
NFC = {"type": "NFC"}
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+TAIL|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*TAIL|NUMBERS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = {**QWEN2, "pattern": {"Regex": _CASED.replace("TAIL", "").replace("NUMBERS", r"\p{N}")}}
GPT4O = {
    **QWEN2,
    "pattern": {"Regex": _CASED.replace("TAIL", _ENGLISH).replace("NUMBERS", r"\p{N}{1,3}")},
}
CODER = [
    {**QWEN2, "pattern": {"Regex": regex}}
    for regex in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
]
# llama.cpp's name, then normalizer, steps before the merges, whether whole words skip the merges
BYTE_LEVEL: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {
    "qwen2": (NFC, [QWEN2, BYTES], False),
    "llama-bpe": (None, [LLAMA3, BYTES], True),
    "smaug-bpe": (None, [LLAMA3, BYTES], False),
    "gpt-2": (None, [GPT2_BYTES], False),
    "smollm": (None, [DIGITS, GPT2_BYTES], False),
    "tekken": (None, [TEKKEN, BYTES], True),
    "gpt-4o": (None, [GPT4O, BYTES], False),
    "deepseek-coder": (None, [*CODER, DIGITS, BYTES], False),
}
# normalizer and pre-tokenizer
PIECES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "llama 2": ({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, None),
    "mistral": (
        None,
        {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
    ),
    "gemma": (REPLACE, BY_SPACE),
}
VARIED = [
    "Hello, world!",
    "  two spaces, three   inside, and at the end  ",
    "a\nb\n\nc\r\n\n\n\td\t\te",
    "naïve café Ångström façade",
    "it's they'll we'd I'm DON'T Can'T",
    "12345 3.14159 1,000,000 x2y22z222",
    "数は42、漢字かな混じり",
    "Привет мир, Ελλάδα, שלום",
    "emoji 🎉👩‍👩‍👧 and \u200b zero width",
    "def f(x):\n    return x ** 2  # comment\n",
    "camelCase HTTPServer snake_case kebab-case",
    "<html>&amp;</html> {json: [1, 2]}",
]


def byte_level(name: str) -> dict[str, Any]:
    """A tokenizer.json of BYTE_LEVEL, with the built-in model's merges."""
    normalizer, steps, whole_words = copy.deepcopy(BYTE_LEVEL[name])
    tokenizer: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    step = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    model = tokenizer["model"] | {"ignore_merges": whole_words}
    return tokenizer | {"normalizer": normalizer, "pre_tokenizer": step, "model": model}


def pieces(name: str) -> dict[str, Any]:
    """A tokenizer.json of PIECES: 800 tokens; merges are all ways to form one, by score."""
    normalizer, step = copy.deepcopy(PIECES[name])
    gemma = name == "gemma"
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    own = [s * n for s in ("\n", SPACE) for n in (2, 3, 4)] if gemma else []
    learned, characters = _learned()
    texts = [*special, *own, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += [text for text in learned if text not in texts]
    # these ends belong to Phi-3; the others never see them
    texts = [*texts, *characters, *(["\n"] if gemma else [])][:796]
    texts += ["<|end|>", "<|user|>", "<|assistant|>", "<|endoftext|>"]
    vocab = {text: token for token, text in enumerate(texts)}
    merges = [pair for text in [*own, *learned] for pair in _ways(text, vocab)]
    control = [*special, "<|end|>", "<|user|>", "<|assistant|>", "<|endoftext|>"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(vocab[text], text, special=text in control)
            for text in sorted([*control, *own], key=vocab.__getitem__)
        ],
        "normalizer": normalizer,
        "pre_tokenizer": step,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write_tokenizer(folder: Path, tokenizer: dict[str, Any], **settings: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json. settings: contents of the latter."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _added(token: int, text: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": special, **flags}


def _ways(text: str, vocab: dict[str, int]) -> list[list[str]]:
    pairs = [[text[:at], text[at:]] for at in range(1, len(text))]
    return [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab and text in vocab]


@functools.cache
def _learned() -> tuple[list[str], list[str]]:
    """Tokens of two or more characters in the order of their merges, then single characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    trainer = trainers.BpeTrainer(vocab_size=480, show_progress=False)
    text = (DATA / "heldout.txt").read_text()
    # llama.cpp knows <|im_end|> as an end wherever it is a token
    lines = [line for line in text.splitlines() if line.isascii()]
    tokenizer.train_from_iterator((re.sub(r"<\|\w+\|>", "", line) for line in lines), trainer)
    texts = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return [text for text in texts if len(text) > 1], [text for text in texts if len(text) == 1]
