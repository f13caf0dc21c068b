"""`localgen cluster up --address` on a Ray cluster with nodes at several loopback addresses."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tcp_server import free_port
from test_cluster_live import Cluster

import localgen

pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has 127.0.0.2 and 127.0.0.3"
)
KEY = "a-key-of-some-length"
LONG_S = 120.0


class RayCluster(Cluster):
    """Nodes of Ray with folders and a token of their own. They end with it."""

    def __init__(self, folder: Path, ray_folder: Path) -> None:
        super().__init__(folder)
        self.environment |= {
            "HOME": str(folder),
            "RAY_TMPDIR": str(ray_folder),
            "RAY_AUTH_TOKEN": "1234567890abcdef" * 2,
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.keys = folder / "keys"
        self.keys.touch(mode=0o600)
        self.keys.write_text(KEY)
        self.http.headers["Authorization"] = f"Bearer {KEY}"
        self.address = ""

    def start_node(self, host: str, version: str = "") -> None:
        """version: of localgen there, as far as it is asked for it."""
        environment = dict(self.environment)
        if version:
            folder = self.keys.with_name("other")
            folder.mkdir()
            text = f'import localgen\nlocalgen.__version__ = "{version}"\n'
            (folder / "sitecustomize.py").write_text(text)
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
        head = ["--head", "--port", "0", "--include-dashboard", "false"]
        # Ray's workers have the ports from 10,002 to 19,999
        port = next(port for port in iter(free_port, None) if port >= 20_000)
        head += ["--ray-client-server-port", str(port)]
        where = ["--address", self.address] if self.address else head
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", host]
        limits = ["--num-cpus", "2", "--object-store-memory", str(80 << 20)]
        limits += ["--dashboard-agent-listen-port", "0"]
        done = subprocess.run(
            [*command, *where, *limits],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(rf"--address='({re.escape(host)}:\d+)'", done.stdout + done.stderr)
        self.address = self.address or (found[1] if found else "")
        assert self.address

    def up(self, *more: str) -> subprocess.CompletedProcess[str]:
        options = ["--port", str(self.port), "--api-key-file", str(self.keys)]
        return self.run("cluster", "up", "tiny", *options, *more)

    def servers(self) -> list[str]:
        """The addresses of the replicas' servers."""
        servers = self.all_named("replica_server")
        return sorted(
            connection.laddr.ip
            for server in servers
            for connection in server.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        )

    def close(self) -> None:
        left = set(self.processes())
        # Ray's agents change their titles, and with them their environment
        left |= {child for each in left for child in each.children(recursive=True)}
        for process in left:
            process.terminate()
        for process in psutil.wait_procs(left, timeout=5.0)[1]:
            process.kill()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    # the paths of Ray's sockets must be short
    built = RayCluster(tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("r"))
    try:
        for host in ("127.0.0.2", "127.0.0.3"):
            built.start_node(host)
        yield built
    finally:
        built.close()


def test_replicas_are_spread_over_the_nodes(nodes: RayCluster) -> None:
    up = nodes.up("--address", "auto")
    assert up.returncode == 0, up.stderr
    assert nodes.servers() == ["127.0.0.2", "127.0.0.3"]
    assert nodes.chat("Hello").status_code == 200
    load = nodes.http.get("/v1/loads").json()["loads"][0]
    assert load["max_total_num_tokens"] > 16_384, "of both"
    assert nodes.http.get("/v1/loads", headers={"Authorization": ""}).status_code == 401


def test_a_cluster_of_another_user_is_not_replaced(nodes: RayCluster, tmp_path: Path) -> None:
    other = copy.copy(nodes)
    folders = {"RUNTIME": str(tmp_path / "run"), "STATE": str(tmp_path / "state")}
    other.environment = nodes.environment | {
        f"LOCALGEN_{name}_DIR": folder for name, folder in folders.items()
    }
    up = other.up("--address", nodes.address)
    assert up.returncode != 0
    said = "a localgen cluster runs in this Ray cluster, started on machine 127.0.0."
    assert said in up.stderr
    assert nodes.chat("Hello").status_code == 200


def test_a_cluster_ends_with_its_owner(nodes: RayCluster) -> None:
    nodes.named("localgen.cluster.owner").kill()
    nodes.wait_until(lambda: nodes.servers() == [])
    up = nodes.up("--address", nodes.address)
    assert up.returncode == 0, up.stderr
    assert nodes.servers() == ["127.0.0.2", "127.0.0.3"]


def test_a_head_that_is_killed_takes_over_what_is_there(nodes: RayCluster) -> None:
    before = _pids(nodes)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(nodes.chat, "Hello", max_tokens=1900, ignore_eos=True, stream=True)
        nodes.named("localgen.cluster.head").kill()
        nodes.wait_until(lambda: len(nodes.servers()) == 2 and not before & _pids(nodes))
        long.exception(LONG_S)
    nodes.wait_until(lambda: _answers(nodes))
    assert nodes.run("cluster", "down").stdout == "cluster stopped\n"
    nodes.wait_until(lambda: nodes.servers() == [])


def _pids(nodes: RayCluster) -> set[int]:
    return {each.pid for each in nodes.all_named("replica_server")}


def _answers(nodes: RayCluster) -> bool:
    try:
        return nodes.chat("Hello").status_code == 200
    except httpx.TransportError:
        return False


def test_errors_of_up(nodes: RayCluster) -> None:
    nodes.start_node("127.0.0.4", version="0.0.9")
    up = nodes.up("--address", nodes.address)
    assert up.returncode != 0
    said = f"has localgen 0.0.9, the cluster has {localgen.__version__}: install the same version"
    assert said in up.stderr
    assert "Traceback" not in up.stderr
    nobody = nodes.up("--address", "127.0.0.2:9")
    assert "no Ray cluster answers at 127.0.0.2:9" in nobody.stderr
    without = nodes.run("cluster", "up", "tiny", "--address", nodes.address)
    assert "--api-key-file" in without.stderr
