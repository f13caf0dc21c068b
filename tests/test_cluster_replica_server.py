"""The server of a replica, as its actor starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from serving import settings_in, short_folder, wait_until
from tcp_server import free_port

from localgen.cluster.config import ClusterConfig
from localgen.cluster.replica_server import ReplicaOptions
from localgen.hub.packaged import packaged_model
from localgen.machine.python_process import python_environment

LONG_S = 60.0


@contextmanager
def replica_server(config: ClusterConfig, **aliases: Path) -> Iterator[httpx.Client]:
    port = free_port()
    options = ReplicaOptions(
        config=config.to_json(), host="127.0.0.1", port=port, keys=(), kv_listen="", secret="s3"
    )
    with short_folder() as folder:
        settings = settings_in(folder)
        settings.create_dirs()
        lines = [f'{name} = "{path}"\n' for name, path in aliases.items()]
        (settings.state_dir / "models.toml").write_text("".join(lines))
        variables = settings.to_environment()
        del variables["LOCALGEN_KEEP_ALIVE"]
        with (
            subprocess.Popen(
                [sys.executable, "-m", "localgen.cluster.replica_server"],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=python_environment() | variables,
            ) as process,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as http,
        ):
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
            process.stdin.flush()
            wait_until(lambda: is_ready(http), LONG_S)
            yield http
            process.stdin.close()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.TransportError:
        return False


def times_left_s(http: httpx.Client) -> dict[str, float | None]:
    """For how long each model stays loaded without requests."""
    return {each["name"]: each["until_s"] for each in http.get("/v1/stats").json()["models"]}


def load(http: httpx.Client, name: str, **fields: str) -> None:
    reply = http.post("/v1/models/load", json={"model": name, **fields})
    assert reply.is_success, reply.text


@pytest.mark.parametrize("keep_alive", [None, "1h"])
def test_the_model_of_the_cluster_stays_loaded(keep_alive: str | None) -> None:
    with replica_server(ClusterConfig(model="tiny", keep_alive=keep_alive)) as http:
        first = times_left_s(http)["tiny"]
        http.post("/v1/models/unload", json={"model": "tiny"}).raise_for_status()
        load(http, "tiny")
        again = times_left_s(http)["tiny"]
        if keep_alive is None:
            assert (first, again) == (None, None)
        else:
            assert first == pytest.approx(3600, abs=LONG_S)
            assert again == pytest.approx(3600, abs=LONG_S)
        load(http, "tiny", keep_alive="2h")
        assert times_left_s(http)["tiny"] == pytest.approx(7200, abs=LONG_S)


def test_another_model_is_unloaded_when_it_is_idle(tmp_path: Path) -> None:
    file = Path(shutil.copy(packaged_model("tiny").path, tmp_path / "other.gguf"))
    with replica_server(ClusterConfig(model="tiny"), other=file) as http:
        load(http, "other")
        found = times_left_s(http)
        assert found.pop("tiny") is None
        assert list(found.values()) == [pytest.approx(300, abs=LONG_S)]
