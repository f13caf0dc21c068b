"""Embeddings with the openai client, a real server, engine and model."""

from __future__ import annotations

import base64
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf_files as files
import httpx2
import numpy as np
import openai
import pytest
from models import TINY_GGUF
from test_llamacpp_embedding import CLS, MEAN, TEXTS, TOLERANCE, theirs

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import LocalClient
from localgen.config import ServerSettings


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        with LocalClient(made) as client:
            client.connect()
            yield made
            client.shutdown()


@pytest.fixture(scope="module")
def client(settings: ServerSettings) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(settings.socket_path))
    http = httpx2.Client(transport=transport, timeout=120)
    with openai.OpenAI(
        base_url="http://localgen/v1", api_key="none", http_client=http, max_retries=0
    ) as made:
        yield made


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_the_built_in_model(client: openai.OpenAI, form: str | None) -> None:
    given = {} if form is None else {"encoding_format": form}
    reply = client.embeddings.create(model="tiny", input=list(TEXTS), **given)  # type: ignore[arg-type]
    assert reply.model == "tiny"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 20
    # base64 decoded by the client, its default, or floats on request
    rows = [
        np.frombuffer(base64.b64decode(entry.embedding), "<f4")
        if isinstance(entry.embedding, str)
        else np.array(entry.embedding, np.float32)
        for entry in reply.data
    ]
    np.testing.assert_allclose(np.stack(rows), theirs(TINY_GGUF, TEXTS, MEAN), atol=TOLERANCE)


def test_fewer_dimensions(client: openai.OpenAI) -> None:
    text = client.embeddings.create(model="tiny", input="The sun", dimensions=100)
    assert len(text.data[0].embedding) == 100
    assert np.linalg.norm(text.data[0].embedding) == pytest.approx(1)


def test_an_embedding_model(client: openai.OpenAI, tmp_path: Path) -> None:
    path = files.bert(tmp_path / "bert.gguf", CLS)
    reply = client.embeddings.create(model=str(path), input=list(TEXTS))
    rows = np.array([entry.embedding for entry in reply.data])
    np.testing.assert_allclose(rows, theirs(path, TEXTS, CLS), atol=TOLERANCE)
    with pytest.raises(openai.BadRequestError, match="is an embedding model"):
        client.chat.completions.create(
            model=str(path), messages=[{"role": "user", "content": "hello"}]
        )
    with pytest.raises(
        openai.BadRequestError, match="dimensions is 99, embeddings of bert have 32"
    ):
        client.embeddings.create(model=str(path), input="a", dimensions=99)


def test_invalid_requests_are_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input is empty") as refused:
        client.embeddings.create(model="tiny", input="")
    assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="tokens, the context is 2,048") as refused:
        client.embeddings.create(model="tiny", input=["a", "word " * 3000])
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "input[1]"
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary of 4096"):
        client.embeddings.create(model="tiny", input=[[1, 2], [5000]])


def test_vectors_beside_a_chat_do_not_change_it(
    settings: ServerSettings, client: openai.OpenAI
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    chat = [Message("user", "Tell me a story.")]

    def story() -> str:
        with LocalClient(settings) as mine:
            return "".join(getattr(part, "text", "") for part in mine.chat("tiny", chat, greedy))

    alone = story()
    told: list[str] = []
    teller = threading.Thread(target=lambda: told.append(story()))
    teller.start()
    reply = client.embeddings.create(model="tiny", input=["word " * 300] * 10)
    teller.join(timeout=120)
    assert told == [alone]
    rows = np.array([entry.embedding for entry in reply.data])
    assert np.abs(rows - rows[0]).max() < TOLERANCE


def test_min_tokens(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    short = client.chat.completions.create(**ask, temperature=0)  # type: ignore[call-overload]
    longer = client.chat.completions.create(  # type: ignore[call-overload]
        **ask, temperature=0, extra_body={"min_tokens": 50, "max_tokens": 60}
    )
    assert short.usage.completion_tokens < 50 < longer.usage.completion_tokens
    assert longer.choices[0].message.content.startswith(short.choices[0].message.content)
    with pytest.raises(openai.BadRequestError, match="min_tokens is 50, more than max_tokens"):
        client.chat.completions.create(  # type: ignore[call-overload]
            **ask, extra_body={"min_tokens": 50, "max_tokens": 40}
        )
