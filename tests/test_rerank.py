"""Reranking: scores are those of transformers, in the answers of Jina's, Cohere's and our names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import gguf_files as files
import httpx
import pytest
from models import TINY_GGUF
from real_server import real_server

pytest.importorskip("torch")

from causal_reranker import CausalReranker
from reranker import Reranker, make_reranker

from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions

QUERY = "what is the sun"
DOCUMENTS = (
    "a spider has eight legs .",
    "the sun is a star .",
    "how far is the moon",
    "star",
    "the moon is a planet , unknownword has many legs . what is the sun",
)
# products have 16 bits; the scores are 0.1 apart
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    return make_reranker(tmp_path_factory.mktemp("rerank"))


@pytest.fixture(scope="module")
def http(reranker: Reranker) -> Iterator[httpx.Client]:
    with (
        real_server(str(reranker.path)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def rerank(http: httpx.Client, path: str = "/v1/rerank", **fields: Any) -> Any:
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    reply = http.post(path, json=body | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_scores_are_those_of_transformers(http: httpx.Client, reranker: Reranker) -> None:
    found = rerank(http)
    expected = [reranker.score(QUERY, document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 0.5, "the documents differ"
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    assert [scores[at] for at in range(len(DOCUMENTS))] == pytest.approx(expected, abs=TOLERANCE)
    assert [each["index"] for each in found["results"]] == sorted(
        range(len(DOCUMENTS)), key=lambda at: -expected[at]
    )
    tokens = sum(len(reranker.encode(QUERY, document)) for document in DOCUMENTS)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert found["model"] == "reranker"
    # another query gives other scores
    other = rerank(http, query="how many legs has a spider")["results"]
    assert {each["index"]: each["relevance_score"] for each in other} != scores


def test_scores_do_not_depend_on_the_other_documents(http: httpx.Client) -> None:
    many = rerank(http, documents=DOCUMENTS * 9)["results"]
    alone = rerank(http, documents=DOCUMENTS[1:2])["results"][0]["relevance_score"]
    same = [each["relevance_score"] for each in many if each["index"] % len(DOCUMENTS) == 1]
    assert same == pytest.approx([alone] * 9, abs=TOLERANCE)


def test_bodies_of_other_servers(http: httpx.Client) -> None:
    expected = rerank(http)["results"]
    assert "document" not in expected[0]
    for path in ("/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
        assert rerank(http, path)["results"] == expected
    objects = [{"text": text} for text in DOCUMENTS]
    best = rerank(http, documents=objects, top_n=2, return_documents=True)["results"]
    assert len(best) == 2
    for each, reference in zip(best, expected, strict=False):
        assert each == reference | {"document": {"text": DOCUMENTS[reference["index"]]}}
    assert len(rerank(http, top_n=99)["results"]) == len(DOCUMENTS)


def test_what_is_refused(http: httpx.Client) -> None:
    good = {"model": "reranker", "query": "a", "documents": ["b"]}
    for path, body, said in (
        ("/v1/rerank", good | {"model": "tiny"}, "this is no reranking model: use the GGUF file"),
        ("/v1/rerank", good | {"documents": []}, "documents must be a list of texts"),
        ("/v1/rerank", good | {"documents": ["a", 5]}, "documents[1] is neither"),
        ("/v1/rerank", good | {"documents": [{"title": "a"}]}, "documents[0]"),
        ("/v1/rerank", good | {"documents": ["a"] * 2049}, "2,049 documents"),
        ("/v1/rerank", good | {"query": ""}, "query"),
        ("/v1/rerank", good | {"top_n": 0}, "top_n"),
        ("/v1/rerank", good | {"rank_fields": ["a"]}, "rank_fields"),
        (
            "/v1/rerank",
            good | {"documents": ["a", "sun " * 70]},
            "documents[1] with the query is 74 tokens, the context is 64",
        ),
        ("/v1/embeddings", {"model": "reranker", "input": "a"}, "POST /v1/rerank"),
        ("/v1/completions", {"model": "reranker", "prompt": "a"}, "POST /v1/rerank"),
    ):
        reply = http.post(path, json=body)
        assert (reply.status_code, said in reply.text) == (400, True), (body, reply.text)


def test_a_decoder_gives_the_probability_of_yes(tmp_path: Path) -> None:
    """As Qwen3-Reranker: two classes, the last token's."""
    causal = CausalReranker(tmp_path, "<|im_start|>{query}\n{document}<|im_end|>")
    model, tokenizer = pair_tokenizer(causal.path)
    pairs = [tokenizer.encode_pair(QUERY, document) for document in DOCUMENTS]
    model.close()
    expected = [causal.score(tokens) for tokens in pairs]
    assert max(expected) - min(expected) > 0.2, "the documents differ"
    with real_server(str(causal.path)) as server, httpx.Client(base_url=server.url) as client:
        results = rerank(client, model="causal")["results"]
    scores = {each["index"]: each["relevance_score"] for each in results}
    assert [scores[at] for at in range(len(DOCUMENTS))] == pytest.approx(expected, abs=TOLERANCE)


def pair_tokenizer(path: Path) -> tuple[LlamaModel, LlamaCppTokenizer]:
    model = LlamaModel(path, resolve_llama_options(LoadOptions()), lambda share: None)
    return model, LlamaCppTokenizer(model)


def test_pairs_are_encoded_as_by_transformers(reranker: Reranker) -> None:
    model, tokenizer = pair_tokenizer(reranker.path)
    for document in DOCUMENTS:
        assert tokenizer.encode_pair(QUERY, document) == reranker.encode(QUERY, document)
    model.close()


def test_pairs_of_roberta_have_two_separators(tmp_path: Path) -> None:
    """<s> query </s> </s> document </s>"""
    flags = ("bos", "eos", "sep")
    changes: dict[str, files.Change] = {
        f"tokenizer.ggml.add_{name}_token": (True, gguf.GGUFValueType.BOOL) for name in flags
    }
    changes["tokenizer.ggml.seperator_token_id"] = (2, files.UINT32)
    model, tokenizer = pair_tokenizer(files.rewrite(tmp_path / "model.gguf", changes))
    plain, bare = pair_tokenizer(TINY_GGUF)
    query, document = bare.encode("How many?"), bare.encode("Eight legs.")
    found = tokenizer.encode_pair("How many?", "Eight legs.")
    assert found == [0, *query, 2, 2, *document, 2]
    model.close()
    plain.close()


def test_a_template_of_the_model_makes_the_pair(tmp_path: Path) -> None:
    template = "<|im_start|>Q: {query} D: {document}<|im_end|>"
    changes: dict[str, files.Change] = {"tokenizer.chat_template.rerank": (template, files.STRING)}
    model, tokenizer = pair_tokenizer(files.rewrite(tmp_path / "model.gguf", changes))
    text = "<|im_start|>Q: {document} D: b<|im_end|>"
    assert tokenizer.encode_pair("{document}", "b") == tokenizer.encode(text)
    model.close()
