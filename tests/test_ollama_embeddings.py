"""Ollama's own client requests embeddings of the built-in model."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import ollama
import pytest
from real_server import RealServer, real_server

TEXTS = ["What is 17 + 25?", "A tale of the sea."]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> ollama.Client:
    return ollama.Client(server.url)


def test_several_texts(client: ollama.Client) -> None:
    reply = client.embed("tiny", TEXTS)
    vectors = np.array(reply.embeddings)
    assert vectors.shape[0] == 2
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert reply.model == "tiny"
    assert (reply.prompt_eval_count or 0) > 2
    assert (reply.total_duration or 0) > 0
    alone = client.embed(
        "tiny", TEXTS[1], truncate=True, keep_alive="1m", options={"num_thread": 2}
    )
    assert np.array(alone.embeddings)[0] @ vectors[1] > 0.9999


def test_fewer_dimensions(client: ollama.Client) -> None:
    whole = np.array(client.embed("tiny", TEXTS[0]).embeddings)[0]
    cut = np.array(client.embed("tiny", TEXTS[0], dimensions=8).embeddings)[0]
    assert cut == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)


def test_older_embeddings_path_gives_the_same_vector(client: ollama.Client) -> None:
    vector = client.embeddings("tiny", TEXTS[0]).embedding
    assert np.array(vector) @ np.array(client.embed("tiny", TEXTS[0]).embeddings)[0] > 0.9999


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"model": "tiny"}, "input is missing"),
        ({"model": "tiny", "input": []}, "input must be a string"),
        ({"model": "tiny", "input": "a", "options": {"temperature": 1}}, "temperature"),
        ({"model": "tiny", "input": "a", "options": {"num_ctx": 64}}, "num_ctx"),
        ({"model": "tiny", "input": "a", "dimensions": 10_000}, "dimensions is 10,000"),
        ({"model": "tiny", "input": "word " * 5000}, "2,048"),
        ({"model": "tiny", "input": "a", "other": 1}, "unknown field other"),
    ],
)
def test_invalid_requests_are_rejected(
    server: RealServer, body: dict[str, object], says: str
) -> None:
    reply = httpx.post(f"{server.url}/api/embed", json=body, timeout=60)
    assert reply.status_code == 400
    assert says in reply.json()["error"]
