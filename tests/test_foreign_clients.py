"""Third-party programs with the real server: OpenAI's library, llm, curl."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
from serving import wait_until

from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.machine.python_process import python_environment

KEY = "a-key-for-these-tests"
QUESTION = "What is 17 + 25?"


@dataclass(frozen=True)
class Served:
    """A `localgen serve` over TCP with a key."""

    url: str
    folder: Path

    def openai(self, key: str = KEY) -> openai.OpenAI:
        http = httpx2.Client(trust_env=False, timeout=60)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, http_client=http)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        settings = ServerSettings(runtime_dir=folder / "run", state_dir=folder / "state")
        settings.create_dirs()
        (folder / "keys").write_text(KEY + "\n")
        (folder / "keys").chmod(0o600)
        command = ["localgen.cli.main", "serve", "--port", str(port)]
        server = subprocess.Popen(
            [sys.executable, "-m", *command, "--api-key-file", str(folder / "keys")],
            env=python_environment() | settings.to_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with LocalClient(settings) as client:
            wait_until(lambda: client.health() is not None, 60)
        yield Served(f"http://127.0.0.1:{port}", folder)
        server.terminate()
        assert server.wait(timeout=30) == 0


def test_openai_chat(served: Served) -> None:
    answer = served.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert "42" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_streams_with_usage(served: Served) -> None:
    chunks = list(
        served.openai().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "42" in text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_a_cache_salt_keeps_a_prompt_to_itself(served: Served) -> None:
    def cached_tokens(salt: str) -> int:
        answer = served.openai().completions.create(
            model="tiny", prompt="word " * 200, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached_tokens("mine") == 0
    assert cached_tokens("mine") > 100
    assert cached_tokens("yours") == 0


def test_openai_logprobs_and_a_seed(served: Served) -> None:
    def ask() -> str:
        answer = served.openai().completions.create(
            model="tiny", prompt="Once", seed=7, temperature=1, max_tokens=12, logprobs=2
        )
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.tokens or []) == 12
        return answer.choices[0].text

    assert ask() == ask()


def test_openai_json_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}, "sure": {"type": "boolean"}},
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    answer = served.openai().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": QUESTION}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema, "strict": True},
        },
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert isinstance(found["sum"], int)
    assert isinstance(found["sure"], bool)


def test_openai_lists_models(served: Served) -> None:
    models = served.openai().models
    assert "tiny" in [model.id for model in models.list()]
    assert models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        models.retrieve("nobody/no-such-model")
    with pytest.raises(openai.BadRequestError):  # whether it is there is nobody's business
        models.retrieve("../secret.gguf")


def test_openai_errors(served: Served) -> None:
    ask = served.openai().chat.completions.create
    with pytest.raises(openai.AuthenticationError):
        served.openai("another-key").models.list()
    with pytest.raises(openai.NotFoundError):
        ask(model="no-such-model", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"


def test_llm_answers_through_its_configuration_of_openai_models(served: Served) -> None:
    folder = served.folder / "llm"
    folder.mkdir()
    entry = {"model_id": "mine", "model_name": "tiny", "api_base": f"{served.url}/v1"}
    # JSON is YAML
    models = json.dumps([entry | {"api_key_name": "localgen"}])
    (folder / "extra-openai-models.yaml").write_text(models)
    (folder / "keys.json").write_text(json.dumps({"localgen": KEY}))
    for extra in ([], ["--no-stream"]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "mine", "-o", "temperature", "0", *extra, QUESTION],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"LLM_USER_PATH": str(folder), "NO_PROXY": "127.0.0.1"},
        )
        assert "42" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams_with_a_key(served: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "stream": True}

    def curl(*headers: str) -> str:
        command = ["curl", "-sS", "--noproxy", "*", "-N", "-w", "\n%{http_code}"]
        for header in ("Content-Type: application/json", *headers):
            command += ["-H", header]
        command += [f"{served.url}/v1/chat/completions", "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    assert curl().endswith("401")
    answer = curl(f"Authorization: Bearer {KEY}")
    assert answer.endswith("200")
    assert "data: [DONE]" in answer
