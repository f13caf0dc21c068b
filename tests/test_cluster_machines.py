"""What each machine of a Ray cluster must have, and what `localgen cluster up` says without it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localgen
from localgen.backends.errors import LoadFailed
from localgen.cluster import machines, running
from localgen.cluster.config import ClusterConfig, read_cluster_file, read_settings
from localgen.cluster.machines import (
    Build,
    KeysDigest,
    VersionError,
    check_machines,
    find_problem,
    require_gpus,
    require_listening,
    require_unowned,
    require_version,
)
from localgen.cluster.replica import EngineReplica
from localgen.config import BadSetting, ServerSettings

OTHER = "0.0.9"
VERSIONS = (
    f"machine {socket.gethostname()} has localgen {localgen.__version__}, the cluster has {OTHER}: "
    "install the same version there"
)


def test_a_machine_with_another_version_says_what_to_do() -> None:
    require_version(localgen.__version__)
    with pytest.raises(VersionError) as raised:
        require_version(OTHER)
    assert str(raised.value) == VERSIONS


def test_a_ray_cluster_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        require_listening(f"127.0.0.1:{port}")
    with pytest.raises(LoadFailed, match=f"no Ray cluster answers at 127.0.0.1:{port}: Conn"):
        require_listening(f"127.0.0.1:{port}")
    require_listening("auto")


def test_a_replica_refuses_another_version() -> None:
    replica = object.__new__(EngineReplica)
    with pytest.raises(VersionError, match="install the same version there"):
        EngineReplica.__init__(replica, ClusterConfig(), Build(OTHER, "")).send(None)


def test_the_gateway_refuses_another_version() -> None:
    pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
    from localgen.cluster.deployment import GatewayServer

    gateway = object.__new__(GatewayServer)
    with pytest.raises(VersionError, match="install the same version there"):
        GatewayServer.__init__(gateway, ClusterConfig(), Build(OTHER, ""), None).send(None)


def test_too_few_gpus_are_said_at_once() -> None:
    config = ClusterConfig(replicas=3, gpus_per_replica=2)
    require_gpus(config, 6)
    require_gpus(ClusterConfig(replicas=3), 0)
    with pytest.raises(LoadFailed, match="3 replicas with 2 GPUs each need 6, and Ray has found 4"):
        require_gpus(config, 4)


def test_problems_of_a_machine(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    keys.chmod(0o600)
    good = ClusterConfig(model="tiny", api_key_file=str(keys))
    same = KeysDigest.of(good, b"salt")
    assert find_problem(good, localgen.__version__, same) is None
    assert find_problem(good, OTHER, same) == VERSIONS
    here = f"machine {socket.gethostname()}: "
    model = find_problem(good.with_options(model="no-such-model"), localgen.__version__, same)
    assert model is not None
    assert model.startswith(f"{here}Model 'no-such-model' not found")
    without = find_problem(
        good.with_options(api_key_file=str(tmp_path / "gone")), localgen.__version__, same
    )
    assert without is not None
    assert without.startswith(here)
    assert str(tmp_path / "gone") in without


def test_keys_that_differ_between_machines_are_a_problem(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    config = ClusterConfig(model="tiny", api_key_file=str(keys))
    keys.write_text("a-key-of-some-length\nanother-key\n")
    of_up = KeysDigest.of(config, b"salt")
    keys.write_text("# the same ones\na-key-of-some-length\nanother-key\n")
    assert find_problem(config, localgen.__version__, of_up) is None
    assert "another-key" not in repr(of_up)
    for other in ("another-key\na-key-of-some-length\n", "a-key-of-some-length\n"):
        keys.write_text(other)
        assert find_problem(config, localgen.__version__, of_up) == (
            f"machine {socket.gethostname()}: the keys in {keys} are not those of the machine of "
            "`localgen cluster up`: copy the file from there"
        )


def ray_of(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """A Ray cluster of machines that answer so; an exception is raised."""

    class RayError(Exception):
        pass

    class Unschedulable(RayError):
        pass

    class TooLate(RayError):
        pass

    kinds = {"error": RayError, "gone": Unschedulable, "late": TooLate}

    def get(answer: Any, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(answer, tuple):
            raise kinds[answer[0]](answer[1])
        return answer

    ray = SimpleNamespace(
        nodes=lambda: [
            *({"Alive": True, "NodeManagerHostname": name, "NodeID": name} for name in answers),
            {"Alive": False, "NodeManagerHostname": "dead", "NodeID": "dead"},
        ],
        get=get,
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
    )
    exceptions = SimpleNamespace(
        RayError=RayError, TaskUnschedulableError=Unschedulable, GetTimeoutError=TooLate
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.setattr(machines, "_ask", lambda node, config, keys: answers[node])


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, True),
        ({"DriverIPAddress": "10.0.0.1"}, True),
        ({"IsDead": True}, False),
        ({"Entrypoint": "python train.py"}, False),
        ({"DriverIPAddress": "10.0.0.1", "DriverPid": os.getpid()}, False),
        ({"DriverIPAddress": "10.0.0.1", "DriverPid": 1 << 30}, False),
    ],
)
def test_a_cluster_whose_head_lives_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], refused: bool
) -> None:
    ray_of(monkeypatch, {})
    monkeypatch.setattr(machines, "_END_TIMEOUT_S", 0.05)
    head = {
        "DriverIPAddress": "10.0.0.2",
        "DriverPid": os.getppid(),
        "IsDead": False,
        "Entrypoint": "python -P -m localgen.cluster.head {}",
    }
    state = SimpleNamespace(jobs=lambda: [head | changed])
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace(state=state))
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    if refused:
        with pytest.raises(LoadFailed, match=r"started on machine 10\.0\.0\..* ends it there"):
            require_unowned()
    else:
        require_unowned()


def test_all_machines_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_of(monkeypatch, {"a": None, "b": None, "c": ("gone", "")})
    assert check_machines(ClusterConfig()) == machines.Machines("10.0.0.1", 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("machine b has localgen 1", "machine b has localgen 1"),
        (
            ("error", "Traceback\nModuleNotFoundError: No module named 'localgen'"),
            f"machine b cannot run localgen {localgen.__version__}: ModuleNotFoundError: No module "
            "named 'localgen'",
        ),
        (("late", ""), "machine b does not answer within 60 s"),
    ],
)
def test_the_first_problem_is_told(monkeypatch: pytest.MonkeyPatch, answer: Any, said: str) -> None:
    ray_of(monkeypatch, {"a": None, "b": answer})
    with pytest.raises(LoadFailed) as raised:
        check_machines(ClusterConfig())
    assert raised.value.message == said


def test_up_tells_what_the_owner_of_the_cluster_said(tmp_path: Path) -> None:
    settings = ServerSettings(runtime_dir=tmp_path, state_dir=tmp_path)
    log = running.log_path(settings)
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"INFO worker.py -- Connected.\nerror: {VERSIONS}\nINFO the end\n")
    assert running._failure(settings) == f"the cluster did not start: {VERSIONS} (log: {log})"


@pytest.mark.parametrize(("where", "said"), [("", ""), (", ip=10.0.0.2", "machine 10.0.0.2: ")])
def test_up_tells_on_which_machine_a_model_does_not_fit(
    tmp_path: Path, where: str, said: str
) -> None:
    settings = ServerSettings(runtime_dir=tmp_path, state_dir=tmp_path)
    log = running.log_path(settings)
    log.parent.mkdir(exist_ok=True)
    log.write_text(f"(EngineReplica pid=7{where}) error: it needs 9 GB\n(other) INFO\n")
    expected = f"the cluster did not start: {said}it needs 9 GB (log: {log})"
    assert running._failure(settings) == expected


def test_arguments_are_read_as_the_file_is(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('model = "tiny"\nreplicas = 3\napi_key_file = "keys"\n')
    found = {"model": "tiny", "replicas": 3, "api_key_file": "keys"}
    assert read_settings(found, "args", tmp_path) == read_cluster_file(file)
    for wrong, said in (
        ({"replica": 2}, "args: unknown key 'replica'. Did you mean replicas"),
        ({"replicas": "2"}, "args: replicas must be a whole number, not '2'"),
        ({"replicas": 0}, "args: replicas must be 1 to 1000, not 0"),
    ):
        with pytest.raises(BadSetting) as raised:
            read_settings(wrong, "args", tmp_path)
        assert raised.value.message.startswith(said)
