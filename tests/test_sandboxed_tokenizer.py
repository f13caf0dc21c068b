"""Regular expressions of a tokenizer.json run in the sandbox, with the result of the library."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.template import ChatTemplate

TINY = Path(__file__).parents[1] / "localgen/models/tiny"
VOCAB = 4096
SANDBOX = Sandbox(ChatTemplate)
# time or memory that grows exponentially with the text
EXPLODING = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "^(([a-z])+.)+[A-Z]$"]


def folder_with(tmp_path: Path, place: str, pattern: str) -> Path:
    """A copy of the built-in model whose tokenizer has this regular expression."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings[place] = {"type": "Replace", "content": "x", "pattern": {"Regex": pattern}}
    if place == "pre_tokenizer":
        settings[place] |= {"type": "Split", "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(settings))
    return folder


@settings(max_examples=100)
@given(st.text())
def test_both_encoders_give_the_same_tokens(text: str) -> None:
    ours, theirs = (HfTokenizer.from_folder(TINY, VOCAB, where) for where in (None, SANDBOX))
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_for_embedding(text) == theirs.encode_for_embedding(text)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS limits no memory of a process")
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
@pytest.mark.parametrize("pattern", EXPLODING)
def test_exploding_patterns_end(tmp_path: Path, place: str, pattern: str) -> None:
    tokenizer = HfTokenizer.from_folder(folder_with(tmp_path, place, pattern), VOCAB, SANDBOX)
    with pytest.raises(InvalidRequest, match="tokenizing the prompt "):
        tokenizer.encode("a" * 40 + " 2+2")
    assert HfTokenizer.from_folder(TINY, VOCAB, SANDBOX).encode("a b")


def test_a_pattern_that_cannot_be_compiled(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "pre_tokenizer", "(" * 9999 + ")" * 9999)
    with pytest.raises(LoadFailed, match=r"cannot load .*tokenizer\.json"):
        HfTokenizer.from_folder(folder, VOCAB, SANDBOX)
    assert HfTokenizer.from_folder(TINY, VOCAB, SANDBOX).encode("a b")


def test_the_engine_encodes_in_the_sandbox(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from localgen.backends.cuda.loader import load_cuda_model

    folder = folder_with(tmp_path, "pre_tokenizer", "(a+)+$")
    options = LoadOptions(device="cpu", ctx=64)
    model = load_cuda_model(ModelLoadRequest("tiny", str(folder), options), lambda share: None)
    try:
        with pytest.raises(InvalidRequest, match="tokenizing the prompt"):
            model.tokenizer.encode("a" * 40 + " 2+2")
        assert model.tokenizer.encode("b")
    finally:
        model.runner.close()
