"""Tokenizing and detokenizing with a GGUF vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import gguf_files as files
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import TINY_GGUF

from localgen.backends.errors import InvalidRequest
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions
from localgen.backends.text.detokenize import Detokenizer
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Message

BOS, BOS_ID = "<|endoftext|>", 0


@pytest.fixture(scope="module")
def vocab() -> Iterator[LlamaCppTokenizer]:
    model = LlamaModel(TINY_GGUF, resolve_llama_options(LoadOptions()), lambda share: None)
    yield LlamaCppTokenizer(model)
    model.close()


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppTokenizer]:
    """The same vocabulary, of a model that requires a begin-of-sequence token."""
    path = tmp_path_factory.mktemp("bos") / "bos.gguf"
    changes: dict[str, files.Change] = {
        "tokenizer.ggml.add_bos_token": (True, gguf.GGUFValueType.BOOL)
    }
    model = LlamaModel(
        files.rewrite(path, changes), resolve_llama_options(LoadOptions()), lambda share: None
    )
    yield LlamaCppTokenizer(model)
    model.close()


def test_bos_is_put_in_front_once(vocab: LlamaCppTokenizer, with_bos: LlamaCppTokenizer) -> None:
    assert with_bos.encode("hello") == [BOS_ID, *vocab.encode("hello")]
    assert with_bos.encode(BOS + "hello") == with_bos.encode("hello")
    assert with_bos.encode("") == [BOS_ID]
    assert vocab.encode("") == []


def test_a_template_that_writes_bos_does_not_double_it(with_bos: LlamaCppTokenizer) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    template = ChatTemplate(source, bos=with_bos.bos, eos=with_bos.eos)
    tokens = with_bos.encode(template.render([Message("user", "hello")]))
    assert tokens == with_bos.encode("hello")
    assert tokens.count(BOS_ID) == 1


def test_special_tokens_in_the_text_are_tokens_and_show_nothing(vocab: LlamaCppTokenizer) -> None:
    assert (vocab.bos, vocab.eos) == (BOS, "<|im_end|>")
    (end,) = vocab.encode("<|im_end|>")
    assert end in vocab.eos_token_ids
    assert vocab.piece(end) == b""
    assert vocab.piece(BOS_ID) == b""


@given(st.text(max_size=40))
def test_text_survives(vocab: LlamaCppTokenizer, text: str) -> None:
    detokenizer = Detokenizer()
    tokens = vocab.encode(text)
    assert all(0 <= token < vocab.vocab_size for token in tokens)
    assert "".join(detokenizer.feed(vocab.piece(token)) for token in tokens) == text


def test_text_without_utf8_form_is_refused(vocab: LlamaCppTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        vocab.encode("half an emoji: \ud83d")


def test_a_nul_does_not_end_the_text(vocab: LlamaCppTokenizer) -> None:
    assert b"".join(map(vocab.piece, vocab.encode("a\0b"))) == b"a\0b"


def test_a_long_text_is_tokenized_whole(vocab: LlamaCppTokenizer) -> None:
    text = "What is 17 + 25? " * 5000
    assert b"".join(map(vocab.piece, vocab.encode(text))) == text.encode()


def test_pieces_of_a_hundred_thousand_bytes(tmp_path: Path) -> None:
    """A token may be longer than any fixed buffer."""
    reader = gguf.GGUFReader(TINY_GGUF)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokens[4000] = "x" * 100_000
    changes: dict[str, files.Change] = {"tokenizer.ggml.tokens": (tokens, gguf.GGUFValueType.ARRAY)}
    path = files.rewrite(tmp_path / "long.gguf", changes)
    model = LlamaModel(path, resolve_llama_options(LoadOptions()), lambda share: None)
    assert LlamaCppTokenizer(model).piece(4000) == b"x" * 100_000
    model.close()
