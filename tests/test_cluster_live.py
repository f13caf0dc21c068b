"""A cluster of real engines with the built-in model: routing, deaths, its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from localgen.hub.packaged import packaged_model
from localgen.server.http.access import AccessPolicy, open_tcp_socket

pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
LONG_S = 120.0
_LONG_ANSWER = 1500


class Cluster:
    """A cluster with folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.environment = os.environ | {
            "LOCALGEN_RUNTIME_DIR": str(folder / "run"),
            "LOCALGEN_STATE_DIR": str(folder / "state"),
        }
        with open_tcp_socket(AccessPolicy(port=0)) as sock:
            self.port = sock.getsockname()[1]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LONG_S)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "localgen", *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=LONG_S
        )

    def chat(self, system: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        body = {"max_tokens": 4, "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def processes(self) -> list[psutil.Process]:
        """Those that have this cluster's folders in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                folder = process.environ().get("LOCALGEN_STATE_DIR")
                if folder == self.environment["LOCALGEN_STATE_DIR"]:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def all_named(self, name: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it has ended since
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def named(self, name: str) -> psutil.Process:
        """The oldest one: a second head waits."""
        return min(self.all_named(name), key=psutil.Process.create_time)

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self.run("cluster", "status", "--json").stdout or "[]"
        )
        return found

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline, self.replicas()
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    built = Cluster(tmp_path_factory.mktemp("c"))
    up = built.run("cluster", "up", "tiny", "--port", str(built.port))
    assert up.returncode == 0, up.stderr
    assert up.stdout.endswith("answers: localgen chat --url cluster\n")
    yield built
    built.run("cluster", "down")


def test_a_prompt_goes_where_its_beginning_was_computed(cluster: Cluster) -> None:
    prompts = [f"{word} " * 200 for word in ("one", "two", "three", "four")]
    replicas: dict[str, set[str]] = {prompt: set() for prompt in prompts}
    cached = []
    for _ in range(3):
        for prompt in prompts:
            reply = cluster.chat(prompt)
            assert reply.status_code == 200, reply.text
            replicas[prompt].add(reply.headers["x-localgen-replica"])
            cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert all(len(each) == 1 for each in replicas.values())
    assert min(cached[4:]) > 200
    # rendezvous hashing puts 16 prompts on one of two replicas once in 32,768 times
    others = (cluster.chat(f"{number} " * 200) for number in range(12))
    used = set.union(*replicas.values(), {each.headers["x-localgen-replica"] for each in others})
    assert len(used) == 2, "both are used"


def test_engines_have_the_priority_of_other_programs(cluster: Cluster) -> None:
    engines = cluster.all_named("localgen.backends.llamacpp")
    assert len(engines) == 2
    assert {each.nice() for each in engines} == {psutil.Process().nice()}


def test_a_replica_fetches_what_another_has_computed(cluster: Cluster) -> None:
    system = "the quick brown fox jumps over the lazy dog " * 30
    long = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    first = cluster.chat(system, **long)
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(cluster.chat, system, **long) for _ in range(12)]
    answers = [each.result() for each in asked]
    assert len({each.headers["x-localgen-replica"] for each in answers}) == 2, "one is too busy"
    texts = {each.json()["choices"][0]["message"]["content"] for each in (first, *answers)}
    assert len(texts) == 1
    fetched = [part for each in answers for part in each.json()["timings"]["restored"]]
    assert fetched[0]["tier"] == "peer"
    assert fetched[0]["tokens"] > 200


def test_commands_work_with_the_name_cluster(cluster: Cluster) -> None:
    answer = cluster.run("run", "--url", "cluster", "-p", "What is 17 + 25?")
    assert "42" in answer.stdout, answer.stderr
    assert [each["models"] for each in cluster.replicas()] == [["tiny"], ["tiny"]]
    again = cluster.run("cluster", "up")
    assert again.returncode != 0
    assert "`localgen cluster down` ends it first" in again.stderr


def test_another_model_is_loaded_by_one_replica(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    shutil.copy(packaged_model("tiny").path, other)
    cluster.run("cp", str(other), "other")
    replies = [cluster.chat(f"Hello {number}", model="other") for number in range(4)]
    assert [each.status_code for each in replies] == [200] * 4, replies[0].text
    assert len({each.headers["x-localgen-replica"] for each in replies}) == 1
    cluster.wait_until(lambda: [len(each["models"]) for each in cluster.replicas()].count(2) == 1)


def test_loads_and_names_of_models_reach_all_replicas(cluster: Cluster) -> None:
    def request(method: str, path: str, **body: Any) -> tuple[int, Any]:
        reply = cluster.http.request(method, path, json=body)
        return reply.status_code, reply.json() if reply.content else None

    def num_loaded(name: str) -> int:
        return [name in each["models"] for each in cluster.replicas()].count(True)

    assert request("POST", "/api/copy", source="other", destination="third")[0] == 200
    assert request("POST", "/api/copy", source="other", destination="third")[0] == 200
    assert num_loaded("other") == 1
    status, loaded = request("POST", "/v1/models/load", model="third")
    assert (status, loaded["model"]["name"]) == (200, "other")
    assert num_loaded("other") == 2
    listed = cluster.http.get("/api/ps").json()["models"]
    assert sorted(each["name"] for each in listed) == ["other", "tiny"]
    with cluster.http.stream(
        "POST", "/v1/models/load", json={"model": "third", "stream": True}
    ) as reply:
        *_, last, done, _ = reply.read().decode().split("\n\n")
    assert ("model" in json.loads(last.removeprefix("data: ")), done) == (True, "data: [DONE]")
    assert request("POST", "/api/generate", model="third", keep_alive=0)[0] == 200
    cluster.wait_until(lambda: num_loaded("other") == 0)
    assert request("POST", "/v1/models/load", model="none")[0] == 404
    status, refused = request("DELETE", "/api/delete", model="tiny")
    assert (status, refused["error"]) == (400, "tiny is built into localgen and cannot be removed")
    assert request("DELETE", "/api/delete", model="third")[0] == 200
    assert request("DELETE", "/api/delete", model="third")[0] == 404


def test_an_unload_reaches_all_replicas(cluster: Cluster) -> None:
    def num_loaded() -> int:
        return ["tiny" in each["models"] for each in cluster.replicas()].count(True)

    def unload() -> Any:
        return cluster.http.post("/v1/models/unload", json={"model": "tiny"}).json()

    assert num_loaded() == 2
    assert unload() == {"unloaded": True}
    assert num_loaded() == 0
    assert unload() == {"unloaded": False}
    assert cluster.chat("Hello").status_code == 200, "it is loaded again"


def test_statistics_lack_only_a_replica_that_hangs(cluster: Cluster) -> None:
    hanging = cluster.named("ServeReplica:localgen:EngineReplica")
    hanging.suspend()
    try:
        assert len(cluster.replicas()) == 1
    finally:
        hanging.resume()
    cluster.wait_until(lambda: len(cluster.replicas()) == 2)


@pytest.mark.parametrize(
    "victim",
    [
        "replica_server",
        "ServeReplica:localgen:EngineReplica",
        "GatewayServer",
        "localgen.cluster.head",
    ],
)
def test_a_process_that_is_killed_is_replaced(cluster: Cluster, victim: str) -> None:
    cluster.named(victim).kill()
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            reply = cluster.chat("Hello")
            if reply.status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.wait_until(lambda: len(cluster.replicas()) == 2)


@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs_server"])
def test_without_ray_the_cluster_starts_anew_at_once(cluster: Cluster, victim: str) -> None:
    """Not when Ray ends it, some 25 s later."""
    head = cluster.named("localgen.cluster.head")
    cluster.named(victim).kill()
    head.wait(10.0)
    cluster.wait_until(lambda: _answers(cluster) and len(cluster.replicas()) == 2)


def _answers(cluster: Cluster) -> bool:
    try:
        return cluster.chat("Hello").status_code == 200
    except httpx.TransportError:
        return False


def test_running_requests_are_answered_when_it_ends_and_nothing_is_left(cluster: Cluster) -> None:
    left = cluster.processes()
    assert len(left) > 5
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.chat, "Hello", max_tokens=1900, ignore_eos=True)
        cluster.wait_until(lambda: _num_running(cluster) == 1)
        down = cluster.run("cluster", "down")
        assert running.result().json()["usage"]["completion_tokens"] == 1900
    assert down.stdout == "cluster stopped\n", down.stderr
    _, alive = psutil.wait_procs(left, timeout=LONG_S)
    assert [each.cmdline() for each in alive] == []
    assert list(Path(cluster.environment["LOCALGEN_RUNTIME_DIR"]).glob("replica-*")) == []
    gone = cluster.run("cluster", "status")
    assert "no cluster runs: `localgen cluster up` starts one" in gone.stderr


def _num_running(cluster: Cluster) -> int:
    return sum(each["running"] for each in cluster.replicas())


def test_ctrl_c_ends_running_requests_with_an_error(tmp_path: Path) -> None:
    """While `localgen cluster down` waits; meanwhile new ones are refused at once."""
    cluster = Cluster(tmp_path)
    up = cluster.run("cluster", "up", "tiny", "--replicas", "1", "--port", str(cluster.port))
    assert up.returncode == 0, up.stderr
    command = [sys.executable, "-m", "localgen", "cluster", "down"]
    long = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(8) as pool:  # many, which take longer than the test
        streams = [pool.submit(cluster.chat, "Hello", **long) for _ in range(8)]
        cluster.wait_until(lambda: _num_running(cluster) == 8)
        with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE) as down:
            cluster.wait_until(lambda: cluster.chat("Hello").status_code == 503)
            assert cluster.chat("Hello").headers["retry-after"] == "5"
            down.send_signal(signal.SIGINT)
            assert down.communicate(timeout=LONG_S)[0] == b"cluster stopped\n"
        last = [each.result().text.rstrip().splitlines()[-1] for each in streams]
    assert all("the cluster is stopping: try again when it runs" in each for each in last), last
    assert cluster.processes() == []


def test_long_prompts_are_computed_by_a_prompt_replica(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    settings = f'model = "tiny"\nport = {cluster.port}\nreplicas = 1\nprompt_replicas = 1\n'
    (tmp_path / "cluster.toml").write_text(settings)
    up = cluster.run("cluster", "up", "-f", str(tmp_path / "cluster.toml"))
    assert up.returncode == 0, up.stderr
    try:
        assert len(cluster.replicas()) == 2
        system = "the quick brown fox jumps over the lazy dog " * 60
        (restored,) = cluster.chat(system).json()["timings"]["restored"]
        assert (restored["tier"], restored["tokens"] > 500) == ("peer", True)
        again = cluster.chat(system).json()["timings"]
        assert (again["restored"], again["cache_n"] > 500) == ([], True)
    finally:
        cluster.run("cluster", "down")


def test_replicas_come_with_the_load_and_leave_without_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    settings = f"""
        model = "tiny"
        port = {cluster.port}
        replicas = 1
        min_replicas = 0
        max_replicas = 2
        target_requests = 1
        downscale_delay_s = 1
    """
    (tmp_path / "cluster.toml").write_text(settings)
    up = cluster.run("cluster", "up", "-f", str(tmp_path / "cluster.toml"))
    assert up.returncode == 0, up.stderr
    try:
        cluster.wait_until(lambda: cluster.replicas() == [])
        stats = cluster.run("cluster", "status")
        assert (stats.returncode, len(stats.stdout.splitlines())) == (0, 1)
        assert cluster.chat("Hello").status_code == 200, "one is started for it"
        long = {"max_tokens": _LONG_ANSWER, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(cluster.chat, "Hello", **long) for _ in range(4)]
            cluster.wait_until(lambda: len(cluster.replicas()) == 2)
            cluster.wait_until(lambda: len(cluster.replicas()) < 2)
        lengths = [each.result().json()["usage"]["completion_tokens"] for each in answers]
        assert lengths == [_LONG_ANSWER] * 4, "those of the replica that left as well"
    finally:
        cluster.run("cluster", "down")


@pytest.mark.parametrize("model", [["tiny"], []])
def test_a_model_that_fits_no_machine_is_refused_in_one_line(
    tmp_path: Path, model: list[str]
) -> None:
    cluster = Cluster(tmp_path)
    cluster.environment |= {"LOCALGEN_MEMORY_LIMIT": "10M", "LOCALGEN_MODEL": "tiny"}
    up = cluster.run("cluster", "up", *model, "--port", str(cluster.port))
    assert up.returncode != 0
    starting, *said = up.stderr.splitlines()
    assert starting.startswith("starting 2 replicas")
    (line,) = said
    assert "the cluster did not start: tiny needs about" in line
    assert "use a smaller model or quantization, or raise LOCALGEN_MEMORY_LIMIT" in line
    assert cluster.processes() == []
