"""/tokenize, /detokenize and /apply-template: the tokens and the text of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from real_server import real_server

from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Request, TokenizeRequest

TEXT = "What is 17 + 25? Größe 🙂"
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with real_server("tiny") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_text_to_tokens_and_back(http: httpx.Client) -> None:
    plain = post(http, "/tokenize", content=TEXT)["tokens"]
    vllm = post(http, "/tokenize", model="tiny", prompt=TEXT)
    assert (vllm["tokens"], vllm["count"]) == (plain, len(plain)), "this model has no such token"
    assert vllm["max_model_len"] == 2048
    back = post(http, "/detokenize", tokens=plain)
    assert (back["content"], back["prompt"]) == (TEXT, TEXT)
    assert post(http, "/tokenize", content="")["tokens"] == []
    assert post(http, "/detokenize", tokens=[])["content"] == ""


def test_pieces_are_the_text(http: httpx.Client) -> None:
    tokens = post(http, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [token["id"] for token in tokens] == post(http, "/tokenize", content=TEXT)["tokens"]
    pieces = [token["piece"] for token in tokens]
    whole = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert whole.decode() == TEXT


def test_the_template_of_a_chat(http: httpx.Client) -> None:
    prompt = post(http, "/apply-template", messages=MESSAGES)["prompt"]
    assert "What is 17 + 25?" in prompt
    rendered = post(http, "/tokenize", prompt=prompt)["tokens"]
    assert post(http, "/tokenize", messages=MESSAGES)["tokens"] == rendered
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    used = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    assert used == len(rendered)


class SpecialTokenizer:
    """A token for each character, and one before a text that does not begin with it."""

    bos, vocab_size, eos_token_ids = "^", 1000, frozenset[int]()

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text if text.startswith("^") else f"^{text}"))

    def piece(self, token: int) -> bytes:
        return b"" if token == ord("^") else chr(token).encode()


@pytest.mark.parametrize(
    ("text", "add_special", "tokens"),
    [("ab", True, "^ab"), ("ab", False, "ab"), ("^ab", False, "^ab"), ("", True, "")],
)
def test_the_begin_of_sequence_token(text: str, add_special: bool, tokens: str) -> None:
    tokenizer: Any = SpecialTokenizer()
    limits: Any = SimpleNamespace(max_len=100)
    processor = InputProcessor(
        limits=limits, tokenizer=tokenizer, template=None, defaults=SamplingParams()
    )
    made = processor.tokenize(TokenizeRequest(Request(id="a", prompt=text), add_special))
    assert "".join(map(chr, made.tokens)) == tokens


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/tokenize", {}, "exactly one of content, prompt and messages"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "exactly one of"),
        ("/tokenize", {"content": 5}, "content must be a string"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"content": "a", "add_special_tokens": True}, "needs prompt"),
        ("/tokenize", {"prompt": "a", "add_special": False}, "needs content"),
        ("/detokenize", {"tokens": [10**6]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0] must be a whole number"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": MESSAGES, "temperature": 1}, "unknown field temperature"),
    ],
)
def test_bad_bodies_are_named(http: httpx.Client, path: str, body: Any, reason: str) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reason in reply.json()["error"]["message"]


def test_an_unknown_model(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"content": "a", "model": "nope"})
    assert reply.status_code == 404
