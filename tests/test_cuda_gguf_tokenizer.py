"""Vocabularies of GGUF files give llama.cpp's tokens, for both kinds of tokenizer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import pytest
from gguf import GGUFValueType, TokenType
from models import TESTS, TINY_GGUF
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

pytest.importorskip("torch")

from benchmarks.adversarial_text import ADVERSARIAL, adversarial_texts
from benchmarks.gguf_model import llama_cpp_tokenizer
from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.pre_tokenizer import PRE_TOKENIZERS
from localgen.backends.formats.gguf.tokenizer import read_gguf_tokenizer
from localgen.backends.formats.hf.tokenizer import HfTokenizer

REWRITTEN = {"gpt-4o", "tekken", "deepseek-coder"}


def ours(path: Path) -> HfTokenizer:
    return read_gguf_tokenizer(GgufFile(path), 10_000)


def assert_same(path: Path, cases: list[str]) -> None:
    """Assert that all tokenizer methods of the engine agree with llama.cpp."""
    mine = ours(path)
    with llama_cpp_tokenizer(path) as theirs:
        for text in cases:
            assert mine.encode(text) == theirs.encode(text), ascii(text)
        for token in range(theirs.vocab_size):
            assert mine.piece(token) == theirs.piece(token), token
        assert mine.eos_token_ids == theirs.eos_token_ids
        assert (mine.bos, mine.eos) == (theirs.bos, theirs.eos)
    assert mine.vocab_size == 10_000
    assert mine.piece(9_999) == b""


def test_built_in_model_is_tokenized_as_in_llama_cpp() -> None:
    assert_same(TINY_GGUF, adversarial_texts(200))


LINES = (TESTS / "data" / "questions.jsonl").read_text().splitlines()


def words(target: Path, pre: str | None) -> Path:
    """A GPT-2 vocabulary whose merges cross words, so that every split of the text shows."""
    trained = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = bytes_only
    trainer = trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=bytes_only.alphabet()
    )
    plain = [text for text in ADVERSARIAL if "<" not in text]
    trained.train_from_iterator([*plain * 3, *LINES], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ends = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    return vocabulary(
        target,
        model="gpt2",
        pre=pre,
        tokens=[*tokens, *ends, "<tag>"],
        token_type=[1] * len(tokens) + [3] * len(ends) + [4],
        merges=[" ".join(pair) for pair in model["merges"]],
        bos_token_id=len(tokens) + 2,
        eos_token_id=len(tokens) + 1,
    )


def vocabulary(target: Path, name: str = "tiny", **values: Any) -> Path:
    """A GGUF file with a vocabulary only. values: of tokenizer.ggml; None removes one."""
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(name)
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            case int():
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            case str():
                writer.add_string(f"tokenizer.ggml.{key}", value)
            case list():
                writer.add_array(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer(pre: str, tmp_path: Path) -> None:
    """As in llama.cpp, which for three differs from the models' authors beyond ASCII."""
    path = words(tmp_path / "pre.gguf", pre)
    assert_same(
        path, [text for text in adversarial_texts(300) if pre not in REWRITTEN or text.isascii()]
    )


def test_pre_tokenizers_differ(tmp_path: Path) -> None:
    assert len({pre.patterns for pre in PRE_TOKENIZERS.values()}) == 8
    seen = set()
    for pre in PRE_TOKENIZERS:
        tokenizer = ours(words(tmp_path / "pre.gguf", pre))
        tokens = [tokenizer.encode(text) for text in adversarial_texts(150)]
        seen.add(tuple(tuple(text[tokenizer.encode("") != [] :]) for text in tokens))
    assert len(seen) >= 8


def test_no_pre_tokenizer_is_the_default_one(tmp_path: Path) -> None:
    assert_same(words(tmp_path / "none.gguf", None), adversarial_texts(50))


def pieces(target: Path, changes: dict[str, Any] | None = None, name: str = "tiny") -> Path:
    """A SentencePiece vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator([f" {line}" for line in LINES], trainer)
    found = trained.get_vocab()
    # single characters come last, as they do in real ones
    order = list(enumerate(sorted(found, key=lambda text: (len(text) == 1, found[text]))))
    random.Random(0).shuffle(order)  # only the scores say what is merged first
    tokens: list[tuple[str, float, TokenType]] = [
        ("<unk>", 0.0, TokenType.UNKNOWN),
        ("<s>", 0.0, TokenType.CONTROL),
        ("</s>", 0.0, TokenType.CONTROL),
        *((f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)),
        *((text, float(-rank), TokenType.NORMAL) for rank, text in order),
        ("<tag>", -1000.0, TokenType.USER_DEFINED),
        # Phi-3 has none of these
        ("    " if name == "tiny" else "<none>", -1000.0, TokenType.USER_DEFINED),
        ("<|im_end|>", -1000.0, TokenType.CONTROL),
        ("<|endoftext|>", -1000.0, TokenType.CONTROL),
        ("[PAD1]", -10000.0, TokenType.UNUSED),
        ("", -10000.0, TokenType.UNUSED),
    ]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [text for text, _, _ in tokens],
        "scores": [score for _, score, _ in tokens],
        "token_type": [int(kind) for _, _, kind in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return vocabulary(target, name, **(values | (changes or {})))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_space_prefix": False},
        {"add_bos_token": False},
        {"bos_token_id": None, "eos_token_id": None},
        {"eot_token_id": 300},
    ],
)
def test_pieces_by_score(changes: dict[str, Any], tmp_path: Path) -> None:
    path = pieces(tmp_path / "spm.gguf", changes)
    assert_same(path, adversarial_texts(200))
    starts = [1] if changes.get("add_bos_token", True) else []
    assert ours(path).encode("") == starts


def test_phi_3_special_tokens_strip_following_spaces(tmp_path: Path) -> None:
    """All but three special tokens remove the spaces after them."""
    path = pieces(tmp_path / "spm.gguf", name="Phi-3 mini")
    known = ["x<|im_end|>  \n y", "<s>  x</s> \t z", "<tag>  x <unk> y"]
    # the original tokenizer also strips spaces beyond ASCII, llama.cpp does not
    same = [text for text in adversarial_texts(50) if not re.search(r">\s*[^\x00-\x7f\S]", text)]
    assert len(same) > 60
    assert_same(path, [*known, *same])
    assert ours(path).encode("<|im_end|>  the") == ours(path).encode("<|im_end|>the")


def test_merges_are_found_by_score_alone(tmp_path: Path) -> None:
    tokenizer = ours(pieces(tmp_path / "spm.gguf"))
    assert len(tokenizer.encode("How many apples are there?")) < 20


def test_a_text_without_utf8_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        ours(TINY_GGUF).encode("half an emoji: \ud83d")


STRING, UINT32 = GGUFValueType.STRING, GGUFValueType.UINT32
TOKENS = "tokenizer.ggml.tokens"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("model", None, "has no tokenizer.ggml.model"),
        ("model", ("bert", STRING), "tokenizer 'bert' is not supported, only gpt2 and llama"),
        ("pre", ("poro-chat", STRING), "pre-tokenizer 'poro-chat' is not supported, only default"),
        ("tokens", None, "has no tokenizer.ggml.tokens"),
        ("tokens", (["a", "b", "a"], GGUFValueType.ARRAY), "tokens has 'a' twice"),
        ("merges", None, "has no tokenizer.ggml.merges"),
        (
            "merges",
            (["ab"], GGUFValueType.ARRAY),
            "merges has 'ab', which does not join two tokens",
        ),
        ("merges", (["Ġ Ŀŀ"], GGUFValueType.ARRAY), "has 'Ġ Ŀŀ', which does not join two tokens"),
        ("token_type", ([1, 1], GGUFValueType.ARRAY), "token_type has 2 values, 4096 are needed"),
        ("eos_token_id", (5000, UINT32), "eos_token_id is 5000, not one of 4,096 tokens"),
        ("model", ("llama", STRING), "has no tokenizer.ggml.scores"),
    ],
)
def test_bad_vocabularies_are_rejected(
    key: str, change: gguf_files.Change, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    if change and change[1] is GGUFValueType.ARRAY:
        changes: Any = {f"tokenizer.ggml.{key}": None}
        kind = GGUFValueType.STRING if isinstance(change[0][0], str) else GGUFValueType.INT32
        changes = {f"tokenizer.ggml.{key}": (change[0], GGUFValueType.ARRAY, kind)}
    else:
        changes = {f"tokenizer.ggml.{key}": change}
    gguf_files.rewrite(path, changes)
    with pytest.raises(LoadFailed) as failure:
        ours(path)
    assert str(path) in str(failure.value)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_more_tokens_than_the_model_has_rows() -> None:
    with pytest.raises(LoadFailed, match=r"it has 4,096 tokens, the model 4,000"):
        read_gguf_tokenizer(GgufFile(TINY_GGUF), 4_000)
