"""`localgen launch`: real commands and server, with a program in the place of each agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import settings_in, short_folder, wait_until

from localgen.backends.model_info import LoadOptions
from localgen.cli.agents import AGENTS, AgentModel, without_proxy
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.machine.python_process import python_environment

MODEL = AgentModel("http://127.0.0.1:1", "a-key", "me/llama:q4", 32_768)
# answers one prompt with what its settings say, as the agent of its name would ask
PROGRAM = """\
#!{python}
import json, os, pathlib, sys, time
import httpx
from localgen.backends.model_info import LoadOptions
from localgen.cli.agents import AGENTS
name, folder = pathlib.Path(sys.argv[0]).name, pathlib.Path(__file__).parent
given = {{"arguments": sys.argv[1:], "variables": dict(os.environ)}}
(folder / "given.json").write_text(json.dumps(given))
if "wait" in sys.argv:
    (folder / "waits").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(3)
url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_AUTH_TOKEN"]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 20, "temperature": 0}}
body["messages"] = [{{"role": "user", "content": "What is 17 + 25?"}}]
for headers in ({{}}, {{"x-api-key": "wrong-key"}}, {{"authorization": "Bearer " + key}}):
    reply = httpx.post(url + "/v1/messages", json=body, headers=headers, timeout=60)
    print(reply.status_code)
print(reply.json()["content"][0]["text"])
sys.exit(5)
"""


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with short_folder() as folder:
        made = settings_in(folder)
        made.create_dirs()
        yield made
        with LocalClient(made) as client:
            client.shutdown()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH with a program named claude."""
    program = tmp_path / "claude"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return tmp_path


def start(settings: ServerSettings, programs: Path, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    return subprocess.Popen(
        [sys.executable, "-m", "localgen.cli.main", "launch", *arguments],
        env=python_environment() | settings.to_environment() | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_agent_asks_with_its_key_while_it_runs(settings: ServerSettings, programs: Path) -> None:
    launched = start(settings, programs, "claude", "-m", "tiny", "--", "-p", "hello")
    shown, notices = launched.communicate(timeout=90)
    assert shown.split("\n") == ["401", "401", "200", "17 + 25 = 42.", ""]
    assert launched.returncode == 5, "the status of the agent"
    assert "claude uses tiny with a context of 2,048 tokens; agents need 16,384" in notices
    given = json.loads((programs / "given.json").read_text())
    assert given["arguments"] == ["--model", "tiny", "-p", "hello"]
    url = given["variables"]["ANTHROPIC_BASE_URL"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_a_larger_context_of_a_loaded_model_is_named(
    settings: ServerSettings, programs: Path
) -> None:
    with LocalClient(settings) as client:
        client.connect()
        client.load("tiny", LoadOptions())
    launched = start(settings, programs, "claude", "-m", "tiny", "--ctx", "1024")
    _, notices = launched.communicate(timeout=90)
    assert "2,048 tokens (it is loaded with that already, --ctx asked for 1,024)" in notices


def test_an_open_connection_ends_with_the_agent(settings: ServerSettings, programs: Path) -> None:
    launched = start(settings, programs, "claude", "-m", "tiny", "--", "wait")
    try:
        wait_until((programs / "waits").exists, 60)
        variables = json.loads((programs / "given.json").read_text())["variables"]
        headers = {"x-api-key": variables["ANTHROPIC_AUTH_TOKEN"]}
        with httpx.Client(base_url=variables["ANTHROPIC_BASE_URL"], trust_env=False) as http:
            assert http.get("/v1/models", headers=headers).status_code == 200
            os.killpg(launched.pid, signal.SIGINT)
            assert launched.wait(30) == 3, "Ctrl+C is for the agent"
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                reply = http.get("/v1/models", headers=headers)
                if reply.status_code == 401:
                    break
                time.sleep(0.05)
            assert reply.status_code == 401
    finally:
        launched.kill()
        launched.communicate()


def test_only_local_clients_open_ports(settings: ServerSettings, programs: Path) -> None:
    with LocalClient(settings) as client:
        client.connect()
        with client.private_port() as port:
            headers = {"x-api-key": port.key}
            reply = httpx.post(f"{port.url}/v1/private-port", headers=headers, trust_env=False)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["cursor"], "no agent 'cursor': use claude, codex, opencode, aider, goose"),
        (["goose"], "goose is not installed: see"),
        (["claude", "-m", "nope"], "Model 'nope' not found"),
        (["claude", "-m", "MODEL"], "`localgen cp PATH NAME` creates an alias"),
        (["claude", "-m", "tiny", "--ctx", "9999"], "was trained for 2,048 tokens"),
        (["claude", "-m", "tiny", "--ctx", "0"], "--ctx"),
        (["claude", "--version"], "--version; arguments of the agent come after --"),
    ],
)
def test_what_cannot_be_launched(
    settings: ServerSettings, programs: Path, arguments: list[str], reason: str
) -> None:
    path = Path(__file__).parent.parent / "localgen/models/tiny.gguf"
    given = [str(path) if argument == "MODEL" else argument for argument in arguments]
    launched = start(settings, programs, *given)
    shown, notices = launched.communicate(timeout=60)
    assert launched.returncode not in (0, 5)
    assert shown == ""
    assert reason in " ".join(notices.split())
    assert "Traceback" not in notices
    assert not (programs / "given.json").exists()


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_all_and_its_key_is_in_no_argument(name: str) -> None:
    settings = AGENTS[name].settings(MODEL)
    told = " ".join((*settings.variables.values(), *settings.arguments))
    assert MODEL.url in told
    assert MODEL.name in told
    assert MODEL.key in settings.variables.values(), "not in the list of processes"
    assert MODEL.key not in " ".join(settings.arguments)
    assert name == "aider" or str(MODEL.ctx) in told


def test_settings_of_codex_are_toml() -> None:
    import tomllib

    options = AGENTS["codex"].settings(MODEL).arguments
    assert options[::2] == ("-c",) * (len(options) // 2)
    config: dict[str, Any] = tomllib.loads("\n".join(options[1::2]))
    provider = config["model_providers"]["localgen"]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:1/v1", "responses")
    assert provider["env_key"] in AGENTS["codex"].settings(MODEL).variables
    assert (config["model"], config["model_context_window"]) == (MODEL.name, MODEL.ctx)


def test_a_proxy_gets_no_key() -> None:
    assert without_proxy({})["NO_PROXY"] == "127.0.0.1,localhost"
    assert without_proxy({"NO_PROXY": "a.example"})["no_proxy"] == "a.example,127.0.0.1,localhost"


def test_settings_that_keep_prompts_cached() -> None:
    variables = AGENTS["claude"].settings(MODEL).variables
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert variables["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    config = json.loads(AGENTS["opencode"].settings(MODEL).variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "localgen/me/llama:q4"
