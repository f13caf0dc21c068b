"""Infill: prompts with a suffix, and /infill, where the model has tokens for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_files as files
import httpx
import pytest
from hf_folders import TINY, edit
from llama_files import LlamaFile
from models import TINY_GGUF
from real_server import real_server

pytest.importorskip("torch")

from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.tokenizer import read_gguf_tokenizer
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.infill import InfillTokens
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX = "Question: What is 17 + 25?\nAnswer: ", "\nQuestion: What is 3 + 4?"
GREEDY = {"temperature": 0}
SIZE = 4096


def of_llama_cpp(path: Path) -> InfillTokens | None:
    model = LlamaModel(path, resolve_llama_options(LoadOptions()), lambda share: None)
    try:
        return LlamaCppTokenizer(model).infill_tokens
    finally:
        model.close()


def of_gguf(path: Path) -> InfillTokens | None:
    return read_gguf_tokenizer(GgufFile(path), SIZE).infill_tokens


@pytest.mark.parametrize(
    "texts",
    [
        QWEN[:3],
        QWEN,
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("<PRE>", "<SUF>", "<MID>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_tokens_are_known_by_their_texts(texts: tuple[str, ...], tmp_path: Path) -> None:
    path = files.infill(tmp_path / "model.gguf", texts)
    first = SIZE - len(texts)
    found = of_llama_cpp(path)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (first, first + 1, first + 2)
    assert of_gguf(path) == found
    has_more = (len(texts) > 3, len(texts) > 4)
    assert (found.repository is not None, found.file is not None) == has_more


def test_ids_in_metadata_are_preferred(tmp_path: Path) -> None:
    path = files.infill(
        tmp_path / "model.gguf", [*QWEN[:3], "<a>", "<b>"], fim_pre=SIZE - 2, fim_sep=SIZE - 1
    )
    found = of_llama_cpp(path)
    assert found == InfillTokens(prefix=SIZE - 2, suffix=SIZE - 4, middle=SIZE - 3, file=SIZE - 1)
    assert of_gguf(path) == found


def test_a_folder_has_those_of_its_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    assert HfTokenizer.from_folder(tmp_path, SIZE + 3).infill_tokens is None
    path = tmp_path / "tokenizer.json"
    added = json.loads(path.read_text())["added_tokens"]
    new = [added[0] | {"id": SIZE + at, "content": text} for at, text in enumerate(QWEN[:3])]
    edit(path, added_tokens=added + new)
    found = HfTokenizer.from_folder(tmp_path, SIZE + 3).infill_tokens
    assert found == InfillTokens(prefix=SIZE, suffix=SIZE + 1, middle=SIZE + 2)


def test_models_without_such_tokens() -> None:
    assert of_llama_cpp(TINY_GGUF) is None
    assert of_gguf(TINY_GGUF) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.infill(tmp_path_factory.mktemp("infill") / "coder.gguf", QWEN)


@pytest.fixture(scope="module")
def llama(model: Path) -> Iterator[LlamaFile]:
    file = LlamaFile(model)
    yield file
    file.close()


@pytest.fixture(scope="module", params=[(), ("--backend", "cuda", "--device", "cpu")])
def http(model: Path, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param:
        pytest.importorskip("torch")
    with (
        real_server(str(model), "--ctx", "512", *request.param) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> Any:
    reply = http.post(path, json=GREEDY | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def greedy(llama: LlamaFile, tokens: list[int], count: int = 8) -> list[int]:
    return llama.greedy_tokens(tokens, count)


def test_a_suffix_is_written_behind_the_prompt(http: httpx.Client, llama: LlamaFile) -> None:
    """llama.cpp itself gives this answer to the prompt of prefix, suffix and middle."""
    tokens = llama.tokenize(f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>")
    expected = llama.text(greedy(llama, tokens))
    given = {"prompt": PREFIX, "max_tokens": 8}
    reply = post(http, "/v1/completions", suffix=SUFFIX, **given)
    assert reply["choices"][0]["text"] == expected
    assert reply["usage"]["prompt_tokens"] == len(tokens)
    plain = post(http, "/v1/completions", **given)
    assert plain["choices"][0]["text"] != expected
    assert post(http, "/v1/completions", suffix="", **given)["choices"] == plain["choices"]
    # a prompt of tokens is the prefix too
    ids = llama.tokenize(PREFIX)
    again = post(http, "/v1/completions", suffix=SUFFIX, **given | {"prompt": ids})
    assert again["choices"] == reply["choices"]


def test_ollama_generates_before_a_suffix(http: httpx.Client, llama: LlamaFile) -> None:
    tokens = llama.tokenize(f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>")
    body: dict[str, Any] = {
        "model": "coder",
        "prompt": PREFIX,
        "suffix": SUFFIX,
        "stream": False,
        "options": GREEDY | {"num_predict": 8},
    }
    found = http.post("/api/generate", json=body).json()
    assert found["response"] == llama.text(greedy(llama, tokens))
    assert found["prompt_eval_count"] == len(tokens)
    empty = http.post("/api/generate", json=body | {"prompt": ""}).json()
    assert empty["prompt_eval_count"] == len(tokens) - len(llama.tokenize(PREFIX))
    refused = http.post("/api/generate", json=body | {"system": "Be brief."})
    assert (refused.status_code, "a suffix is for plain prompts" in refused.text) == (400, True)


def test_infill_puts_other_files_first(http: httpx.Client, llama: LlamaFile) -> None:
    given = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8}
    files_part = (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nfirst<|file_sep|>tmp\nsecond"
        "<|file_sep|>filename\n"
    )
    tail = f"<|fim_prefix|>{PREFIX}4<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    extra = [{"filename": "a.py", "text": "first"}, {"text": "second"}]
    tokens = llama.tokenize(files_part + tail)
    whole = post(http, "/infill", prompt="4", input_extra=extra, return_tokens=True, **given)
    expected = greedy(llama, tokens)
    assert (whole["tokens"][: len(expected)], whole["tokens_evaluated"]) == (expected, len(tokens))
    assert whole["content"] == llama.text(expected)
    alone = post(http, "/infill", prompt="4", **given)
    assert alone["tokens_evaluated"] == len(llama.tokenize(tail))
    assert post(http, "/infill", input_prefix="", input_suffix="")["tokens_evaluated"] == 3


def test_infill_streams(http: httpx.Client) -> None:
    given = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 8}
    whole = post(http, "/infill", **given)
    lines = http.post("/infill", json=GREEDY | given | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["content"] for event in events) == whole["content"] != ""
    assert events[-1]["stop"] is True


def test_what_is_refused(http: httpx.Client) -> None:
    for path, body, said in (
        ("/infill", {"input_prefix": PREFIX}, "input_suffix"),
        ("/infill", {"input_prefix": "", "input_suffix": "", "prompt": [1]}, "prompt"),
        ("/infill", {"input_prefix": "", "input_suffix": "a " * 600}, "the context is 512"),
        ("/completion", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "without echo"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "suffix": "b"},
            "suffix is not supported",
        ),
    ):
        reply = http.post(path, json=body)
        assert (reply.status_code, said in reply.text) == (400, True), reply.text
    for path, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}),
        ("/infill", {"model": "tiny", "input_prefix": "a", "input_suffix": ""}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400
        assert "this model has no tokens for infill" in reply.text
