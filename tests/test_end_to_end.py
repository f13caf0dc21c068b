"""The program as users run it: real commands, server, engine and model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from models import questions
from serving import error_line

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import Completion, LocalClient, TextDelta
from localgen.config import ServerSettings

GREEDY = SamplingParams(temperature=0, max_tokens=120)


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        yield made
        LocalClient(made).shutdown()


@pytest.fixture
def client(settings: ServerSettings) -> Iterator[LocalClient]:
    with LocalClient(settings) as made:
        made.connect()
        yield made


def localgen(settings: ServerSettings, *arguments: str, stdin: str = "") -> Any:
    """Run the command line program to its end."""
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | settings.to_environment(),
    )


def ask(client: LocalClient, chat: tuple[Message, ...]) -> tuple[str, Completion]:
    *parts, answer = client.chat("tiny", chat, GREEDY)
    assert isinstance(answer, Completion)
    return "".join(part.text for part in parts if isinstance(part, TextDelta)), answer


def engine(client: LocalClient) -> dict[str, Any]:
    (model,) = client.stats()["models"]
    found: dict[str, Any] = model
    return found


def test_a_piped_question_is_answered(settings: ServerSettings) -> None:
    done = localgen(settings, "run", stdin="What is 17 + 25?")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_the_whole_record(settings: ServerSettings) -> None:
    done = localgen(settings, "run", "tiny", "What is 17 + 25?", "--json")
    record = json.loads(done.stdout)
    assert "42" in record["text"]
    assert record["finish_reason"] == "stop"
    assert record["usage"]["prompt_tokens"] > 0
    assert record["timings"]["ttft_ms"] > 0


def test_a_prompt_over_the_context_is_refused_with_both_numbers(settings: ServerSettings) -> None:
    done = localgen(settings, "run", stdin="word " * 5000)
    assert done.returncode == 4
    assert "tokens, the context is 2,048" in error_line(done)


def test_several_terminals_are_batched_and_say_what_they_say_alone(client: LocalClient) -> None:
    chats = questions(12)
    alone = [ask(client, chat)[0] for chat in chats]
    before = engine(client)["stats"]["step_sequences"]
    together: dict[int, str] = {}

    at_once = threading.Barrier(3, timeout=60)  # on a busy machine, they would come one by one

    def terminal(number: int) -> None:
        with LocalClient(client._settings) as mine:
            for at in range(number, len(chats), 3):
                at_once.wait()
                together[at] = ask(mine, chats[at])[0]

    for _ in range(5):  # an answer that is sent late on a busy machine shares few steps
        threads = [threading.Thread(target=terminal, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        after = engine(client)["stats"]["step_sequences"]
        shared = sum(after[2:]) - sum(before[2:])
        if shared > 20:
            break
    assert shared > 20, "steps with several sequences in one llama_decode"
    different = [at for at in range(len(chats)) if together[at] != alone[at]]
    assert len(different) <= 1, "rounding may tip one answer, see test_llamacpp_runner"


def test_a_client_that_leaves_frees_its_request(client: LocalClient) -> None:
    stream = client.chat(
        "tiny", [Message("user", "Tell me a story.")], SamplingParams(ignore_eos=True)
    )
    next(stream)
    assert engine(client)["stats"] is not None
    stream.close()
    deadline_s = time.monotonic() + 5
    while True:
        stats = engine(client)["stats"]
        if stats["running"] == 0 and stats["requests_total"].get("cancelled"):
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_killed_engine_is_replaced(client: LocalClient) -> None:
    stream = client.chat(
        "tiny", [Message("user", "Tell me a story.")], SamplingParams(ignore_eos=True)
    )
    next(stream)
    os.kill(engine(client)["pid"], signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL") as failure:
        list(stream)
    assert getattr(failure.value, "code", "") == "engine_died"
    assert "42" in ask(client, (Message("user", "What is 17 + 25?"),))[0]


def test_a_killed_server_is_replaced_and_takes_its_engine_along(
    settings: ServerSettings, client: LocalClient
) -> None:
    ask(client, (Message("user", "hello"),))
    health = client.health()
    assert health is not None
    orphan = psutil.Process(engine(client)["pid"])
    os.kill(health.pid, signal.SIGKILL)
    done = localgen(settings, "run", stdin="What is 17 + 25?")
    assert "42" in done.stdout, done.stderr
    orphan.wait(timeout=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_connect(settings: ServerSettings, client: LocalClient) -> None:
    attempt = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: sys.exit(13)"
    )
    path = str(settings.socket_path)
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(path)
    done = subprocess.run([sys.executable, "-c", attempt, path], check=False)
    assert done.returncode == 13
    # nor with access to the folder: the socket itself is private
    settings.runtime_dir.chmod(0o755)
    settings.runtime_dir.parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", attempt, path], check=False)
    settings.runtime_dir.chmod(0o700)
    assert done.returncode == 13


def test_wrong_input_is_one_line(settings: ServerSettings, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing of use")
    for arguments, status, says in (
        (("run", "no-such-model", "hi"), 6, "no-such-model"),
        (("run", str(broken), "hi"), 8, str(broken)),
        (("run", "tiny", "hi", "--temp", "-1"), 3, "--temp is -1"),
        (("run", "tiny", "hi", "--mirostat", "2", "--top-k", "5"), 3, "mirostat replaces top_k"),
        (("run", "tiny", "hi", "-ctk", "q9"), 3, "--cache-type-k is 'q9'"),
        (("run", "tiny", "hi", "-c", "999999"), 3, "999,999"),
        (("chat", "--nonsense"), 2, "--nonsense"),
    ):
        done = localgen(settings, *arguments)
        assert done.returncode == status, (arguments, done.stderr)
        lines = done.stderr.strip().splitlines()
        assert says in lines[-1], done.stderr
        assert "Traceback" not in done.stderr


def test_stop_ends_the_server(settings: ServerSettings, client: LocalClient) -> None:
    ask(client, (Message("user", "hello"),))
    assert "tiny" in localgen(settings, "ps").stdout
    assert localgen(settings, "stop", "tiny").returncode == 0
    assert "tiny" not in localgen(settings, "ps").stdout
    assert localgen(settings, "stop").returncode == 0
    assert client.health() is None
    assert not settings.socket_path.exists()


def test_an_answer_in_json(settings: ServerSettings, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, '
        '"required": ["sum"], "additionalProperties": false}'
    )
    done = localgen(settings, "run", "tiny", "What is 17 + 25?", "-j", f"@{schema}")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["sum"], int)


def test_a_schema_that_is_wrong_says_why(settings: ServerSettings) -> None:
    done = localgen(settings, "run", "tiny", "Hello", "-j", '{"type": "wish"}')
    assert done.returncode == 3
    assert "--json-schema: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}},
            }
        },
        {"json_schema": {"type": "object"}},
        {"grammar": 'root ::= "{}"'},
    ],
)
def test_an_object_over_http(
    client: LocalClient, settings: ServerSettings, asked: dict[str, Any]
) -> None:
    http = httpx.Client(transport=httpx.HTTPTransport(uds=str(settings.socket_path)), timeout=60)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "seed": 1}
    reply = http.post("http://x/v1/chat/completions", json=body | asked | {"max_tokens": 600})
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    http.close()
