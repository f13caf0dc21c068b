"""Chat templates sent by clients are untrusted code: in the real engine, through HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf_files import STRING, rewrite
from serving import ServerHarness, chat_body, server_harness, wait_until

from localgen.backends.text.template import TEMPLATE_LIMITS
from localgen.machine.python_process import python_environment

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
ENDLESS_AT_TIMES = "{% if messages[0].content == 'a' %}" + ENDLESS + "{% endif %}"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__'] }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.append(1) }}",
    "{{ 'x'.format.__self__.__class__.__base__.__subclasses__() }}",
    "{{ range(10**9) | list }}",
]
HEAVY = [
    "{% set n=messages|length %}{{ (9*n)**((9*n)**(9*n)) }}",
    "{{ '%999999999s'|format('x') }}",
    "{{ 'a'*3000000000 }}",
    "{% set ns=namespace(s='a'*16) %}"
    "{% for i in range(40) %}{% set ns.s=ns.s~ns.s %}{% endfor %}{{ ns.s }}",
]


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        process = subprocess.Popen(
            [sys.executable, "-m", "localgen.server"],
            env=python_environment() | built.settings.to_environment(),
        )
        built.processes.append(process)
        wait_until(built.healthy, 30)
        yield built


@pytest.fixture
def asked(served: ServerHarness) -> Iterator[Any]:
    """Loads the built-in model with a template and sends a chat."""

    def ask(template: str) -> Any:
        body = {"model": "tiny", "options": {"chat_template": template}}
        reply = served.http.post("/v1/models/load", json=body, timeout=60)
        if reply.status_code != 200:
            return reply
        return served.chat("tiny", "a", max_tokens=2)

    yield ask
    served.http.post("/v1/models/unload", json={"model": "tiny"})


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_cannot_access_python_or_files(asked: Any, template: str) -> None:
    reply = asked(template)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "invalid_request"
    assert "chat template" in error["message"]
    said = reply.text
    assert "root:" not in said
    assert "subprocess" not in said


@pytest.mark.parametrize("template", HEAVY, ids=range(len(HEAVY)))
def test_heavy_templates_take_neither_the_engine_nor_its_memory(
    served: ServerHarness, asked: Any, template: str
) -> None:
    reply = asked(template)
    assert reply.status_code == 400
    assert "chat template" in reply.json()["error"]["message"]
    assert memory_of_engines(served) < 1 << 30


def memory_of_engines(served: ServerHarness) -> int:
    """Resident bytes of the server and all processes below it."""
    server = psutil.Process(served.processes[0].pid)
    resident = server.memory_info().rss
    for child in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process that ran a template may just end
            resident += child.memory_info().rss
    return resident


def test_endless_template_is_stopped_without_blocking_others(
    served: ServerHarness, asked: Any
) -> None:
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(asked(ENDLESS_AT_TIMES)))
    begun_s = time.monotonic()
    thread.start()
    wait_until(lambda: "tiny" in served.loaded(), 30)
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
    wait_until(lambda: served.stats(tiny(served))["state"] == "loaded", 30)
    while thread.is_alive():
        # a completion needs no template
        assert served.http.post("/v1/completions", json=body).status_code == 200
        time.sleep(0.1)
    assert time.monotonic() - begun_s < TEMPLATE_LIMITS.seconds + 30
    assert replies[0].status_code == 400
    message = replies[0].json()["error"]["message"]
    assert "did not finish within" in message
    assert "`localgen stop` the model, then load it with another --chat-template FILE" in message


def test_no_model_is_loaded_with_a_template_that_is_always_too_slow(
    served: ServerHarness, asked: Any, tmp_path: Path
) -> None:
    """One that is requested, and one that the model brings."""
    reply = asked(ENDLESS)
    assert reply.status_code == 400
    assert "did not finish within 2 s: use another" in reply.json()["error"]["message"]
    rewrite(tmp_path / "slow.gguf", {"tokenizer.chat_template": (ENDLESS, STRING)})
    path = str(tmp_path / "slow.gguf")
    error = served.chat(path, "a").json()["error"]
    assert error["code"] == "load_failed"
    assert "slow.gguf: the chat template did not finish within 2 s" in error["message"]
    assert "use another with --chat-template FILE" in error["message"]
    assert not served.loaded()
    # a template of the user's makes it usable
    body = {"model": path, "options": {"chat_template": "{{ messages[0].content }}"}}
    assert served.http.post("/v1/models/load", json=body, timeout=60).status_code == 200
    assert served.chat(path, "a", max_tokens=2).status_code == 200
    served.http.post("/v1/models/unload", json={"model": path})


def tiny(served: ServerHarness) -> str:
    models: list[dict[str, Any]] = served.http.get("/v1/stats").json()["models"]
    return str(next(Path(found["path"]) for found in models if found["name"] == "tiny"))


def test_engine_survives_hostile_templates(served: ServerHarness) -> None:
    assert served.http.post("/v1/chat/completions", json=chat_body("tiny", "a")).status_code == 200
