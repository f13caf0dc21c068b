"""The files in examples/: Kubernetes and systemd take them, localgen takes their settings, and the
names, ports and paths in them agree."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from jsonschema_rs import ValidationError, validator_for

from localgen.cli import cluster as cluster_cli
from localgen.cli import errors
from localgen.cluster import running
from localgen.cluster.config import GATEWAY, REPLICAS, read_cluster_file, read_settings
from localgen.config import BadSetting

EXAMPLES = Path(__file__).parents[1] / "examples"
MANIFEST = EXAMPLES / "kuberay" / "localgen.yaml"
SYSTEMD = EXAMPLES / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
DATA = Path(__file__).with_name("data")
SCHEMAS = json.loads((DATA / "kubernetes_schemas.json").read_text(encoding="utf-8"))
# `ray start --help` of Ray 2.60, of which the units use these
RAY_START = {
    *("block", "disable-usage-stats", "node-ip-address", "head", "port", "include-dashboard"),
    "address",
}
# systemd.unit(5), systemd.service(5) and systemd.exec(5)
KNOWN = {
    "Unit": {"Description", "Wants", "After", "BindsTo"},
    "Service": {
        *("Type", "User", "EnvironmentFile", "Environment", "ExecStart", "ExecStop"),
        *("Restart", "RestartSec", "RestartPreventExitStatus", "TimeoutStartSec"),
        *("TimeoutStopSec", "KillMode", "UMask", "LimitNOFILE", "LimitMEMLOCK"),
        *("NoNewPrivileges", "ProtectSystem", "ProtectHome", "ReadWritePaths"),
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups"),
        *("LockPersonality", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID"),
        "SystemCallArchitectures",
    },
    "Install": {"WantedBy"},
}
HARDENING = {"NoNewPrivileges", "ProtectHome", "ProtectKernelTunables", "ProtectKernelModules"}


def documents() -> dict[str, Any]:
    found = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def serve_config(service: Any) -> Any:
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def application(service: Any) -> Any:
    (app,) = serve_config(service)["applications"]
    return app


def groups(service: Any) -> dict[str, Any]:
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {each["groupName"]: each for each in workers}


def container(group: Any) -> Any:
    (found,) = group["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("kind", ["RayService", "Secret", "Service"])
def test_kubernetes_takes_the_manifest(kind: str) -> None:
    validator_for(SCHEMAS[kind]).validate(documents()[kind])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """The path of each key of nested objects."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def test_every_misspelt_key_is_refused() -> None:
    free = {"rayStartParams", "labels", "selector", "requests", "limits", "stringData"}
    tried = 0
    for kind, document in documents().items():
        for path in places(document):
            if isinstance(path[-1], int) or free.intersection(path[:-1]):
                continue
            wrong = copy.deepcopy(document)
            inner = wrong
            for step in path[:-1]:
                inner = inner[step]
            inner[f"{path[-1]}s"] = inner.pop(path[-1])
            with pytest.raises(ValidationError):
                validator_for(SCHEMAS[kind]).validate(wrong)
            tried += 1
    assert tried > 60


def test_the_arguments_are_those_of_a_cluster() -> None:
    app = application(documents()["RayService"])
    assert app["import_path"] == "localgen.cluster.deployment:build_from_args"
    assert app["route_prefix"] is None, "Serve's proxy must not pass requests around the keys"
    config = read_settings({"address": "auto"} | app["args"], "args", Path("/"))
    assert config.replicas_per_machine == 1
    with pytest.raises(BadSetting, match="args: unknown key 'replica'"):
        read_settings(app["args"] | {"replica": 1}, "args", Path("/"))


def test_ray_serve_takes_the_configuration() -> None:
    pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
    from ray.serve.schema import ServeDeploySchema

    from localgen.cluster.deployment import build_from_args

    config = serve_config(documents()["RayService"])
    (app,) = ServeDeploySchema.parse_obj(config).applications
    assert app.import_path.partition(":")[2] == build_from_args.__name__
    build_from_args(app.args)


def test_deployments_have_their_names_and_resources() -> None:
    service = documents()["RayService"]
    app = application(service)
    options = {each["name"]: each["ray_actor_options"] for each in app["deployments"]}
    assert set(options) == {REPLICAS, GATEWAY}
    offered = {
        name: json.loads(json.loads(group["rayStartParams"]["resources"]))
        for name, group in groups(service).items()
    }
    assert options[GATEWAY]["resources"] == offered["gateway"]
    assert options[REPLICAS]["resources"] == offered["engines"]
    assert groups(service)["engines"]["replicas"] == app["args"]["replicas"]
    assert groups(service)["gateway"]["replicas"] == 1
    assert all(each["num_cpus"] == 0 for each in options.values())


def test_ports_and_names_agree() -> None:
    found = documents()
    service, ray = found["Service"], found["RayService"]
    args, gateway = application(ray)["args"], groups(ray)["gateway"]
    (port,) = service["spec"]["ports"]
    (open_port,) = container(gateway)["ports"]
    assert args["host"] == "0.0.0.0"
    assert open_port["containerPort"] == port["port"] == args["port"]
    probe = container(gateway)["readinessProbe"]["httpGet"]
    assert probe == {"path": "/livez", "port": open_port["name"]}
    assert port["targetPort"] == open_port["name"]
    labels = [group["template"]["metadata"]["labels"] for group in groups(ray).values()]
    chosen = [each for each in labels if service["spec"]["selector"].items() <= each.items()]
    assert chosen == [gateway["template"]["metadata"]["labels"]]
    assert service["metadata"]["name"] in args["allow_host"].split(",")
    head = container(ray["spec"]["rayClusterConfig"]["headGroupSpec"])
    assert "readinessProbe" not in head, "KubeRay sends the application to a head that is ready"
    assert {"serve", "dashboard"} <= {each["name"] for each in head["ports"]}


def test_keys_are_where_the_arguments_say() -> None:
    found = documents()
    ray = found["RayService"]
    file = Path(application(ray)["args"]["api_key_file"])
    for group in groups(ray).values():
        (mount,) = container(group)["volumeMounts"]
        (volume,) = group["template"]["spec"]["volumes"]
        assert (mount["name"], mount["readOnly"]) == (volume["name"], True)
        assert Path(mount["mountPath"]) == file.parent
        assert volume["secret"]["secretName"] == found["Secret"]["metadata"]["name"]
        assert volume["secret"]["defaultMode"] == 0o440
        user = group["template"]["spec"]["securityContext"]
        assert user["runAsNonRoot"] is True
        assert user["fsGroup"] == user["runAsUser"] > 0
    assert file.name in found["Secret"]["stringData"]


def test_ray_kills_no_actors_for_memory_that_engines_have() -> None:
    ray = documents()["RayService"]
    for group in (ray["spec"]["rayClusterConfig"]["headGroupSpec"], *groups(ray).values()):
        variables = {each["name"]: each["value"] for each in container(group)["env"]}
        assert variables == {"RAY_memory_monitor_refresh_ms": "0"}
    for path in UNITS:
        assert Unit(path).environment["RAY_memory_monitor_refresh_ms"] == "0"


def test_engines_have_the_priority_of_other_programs() -> None:
    for path in UNITS:
        assert Unit(path).environment["RAY_worker_niceness"] == "0"


def test_versions_of_ray_agree() -> None:
    project = (EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r'"ray\[serve\]>=(\d+\.\d+),', project)
    assert required is not None
    cluster = documents()["RayService"]["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == f"{required[1]}.0"
    assert cluster["authOptions"] == {"mode": "token"}
    dockerfile = (EXAMPLES / "kuberay" / "Dockerfile").read_text(encoding="utf-8")
    user = re.search(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert user is not None
    pod = cluster["headGroupSpec"]["template"]["spec"]
    assert int(user[1]) == pod["securityContext"]["runAsUser"]
    images = {container(each)["image"] for each in [*groups(documents()["RayService"]).values()]}
    assert images == {pod["containers"][0]["image"]}
    assert images.pop() in dockerfile


class Unit:
    """A unit file: its sections, with all values of a key."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, dict[str, list[str]]] = {}
        section = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
                self.values[section] = {}
            elif line and not line.startswith("#"):
                key, _, value = line.partition("=")
                self.values[section].setdefault(key, []).append(value)

    def __getitem__(self, key: str) -> str:
        (value,) = self.values["Service"][key]
        return value

    @property
    def environment(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.values["Service"]["Environment"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_keys_of_units_are_known(path: Path) -> None:
    unit = Unit(path)
    assert set(unit.values) == set(KNOWN)
    for section, values in unit.values.items():
        assert set(values) <= KNOWN[section]
    assert set(unit.values["Service"]) >= HARDENING
    assert all(unit[key] == "yes" for key in HARDENING)
    # a signal to all processes would leave no time to end answers; Ray takes up to 30 s
    assert (unit["KillMode"], int(unit["TimeoutStopSec"]) > 30) == ("mixed", True)
    assert unit["ProtectSystem"] == "strict"
    assert unit["Type"] == ("forking" if path.stem == "localgen-cluster" else "exec")
    # Ray's sockets are in /tmp, which all units of a machine must share
    assert unit["ReadWritePaths"].split() == ["/var/lib/localgen", "/tmp"]
    folders = ("LOCALGEN_RUNTIME_DIR", "LOCALGEN_STATE_DIR")
    assert all(unit.environment[name].startswith("/var/lib/localgen/") for name in folders)
    assert unit.environment["RAY_AUTH_MODE"] == "token"


def test_units_of_a_machine_share_their_settings() -> None:
    assert len(UNITS) == 3
    first, *others = (Unit(path) for path in UNITS)
    for other in others:
        assert other.environment == first.environment
        for key in ("User", "EnvironmentFile", "UMask"):
            assert other[key] == first[key]


@pytest.mark.parametrize("name", ["head", "worker"])
def test_ray_start_has_these_options(name: str) -> None:
    unit = Unit(SYSTEMD / f"localgen-ray-{name}.service")
    program, command, *words = shlex.split(unit["ExecStart"])
    assert (program, command) == ("/opt/localgen/bin/ray", "start")
    options = {word.removeprefix("--") for word in words if word.startswith("--")}
    assert options <= RAY_START
    assert "block" in options, "systemd watches the process"
    assert ("head" in options) == (name == "head") != ("address" in options)
    variables = set(re.findall(r"\$\{(\w+)\}", " ".join(words)))
    settings = (SYSTEMD / "cluster.env").read_text(encoding="utf-8")
    assert variables <= set(re.findall(r"^(\w+)=", settings, re.MULTILINE))
    if name == "worker":
        head = shlex.split(Unit(SYSTEMD / "localgen-ray-head.service")["ExecStart"])
        port = head[head.index("--port") + 1]
        assert words[words.index("--address") + 1] == f"${{HEAD_IP}}:{port}"


def test_ray_itself_knows_the_options() -> None:
    pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
    from ray.scripts.scripts import start

    flags = {flag.removeprefix("--") for each in start.params for flag in each.opts}
    assert flags >= RAY_START


def test_localgen_takes_the_command_lines() -> None:
    unit = Unit(SYSTEMD / "localgen-cluster.service")
    program, group, name, *words = shlex.split(unit["ExecStart"])
    assert (program, group, name) == ("/opt/localgen/bin/localgen", "cluster", "up")
    commands = typer.main.get_command(cluster_cli.group).commands  # type: ignore[attr-defined]
    with commands[name].make_context(name, words) as context:
        assert context.params["address"] == "auto"
        assert context.params["file"] == Path("/etc/localgen/cluster.toml")
    with pytest.raises(typer.TyperException):
        commands[name].make_context(name, [*words, "--adress", "auto"])
    *_, stop = shlex.split(unit["ExecStop"])
    assert stop in commands
    assert int(unit["TimeoutStopSec"]) > running.DRAIN_TIMEOUT_S + running._END_TIMEOUT_S
    wanted = {errors.USAGE_ERROR, *map(errors.exit_status, ("bad_setting", "model_not_found"))}
    assert set(map(int, unit["RestartPreventExitStatus"].split())) == wanted


def test_the_cluster_belongs_to_ray_of_its_machine() -> None:
    unit = Unit(SYSTEMD / "localgen-cluster.service")
    for section, key in (("Unit", "BindsTo"), ("Unit", "After"), ("Install", "WantedBy")):
        assert unit.values[section][key] == ["localgen-ray-head.service"]


def test_the_file_of_the_cluster_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    shutil.copy(SYSTEMD / "cluster.toml", file)
    (tmp_path / "keys").write_text("a-key-of-some-length\n")
    (tmp_path / "keys").chmod(0o600)
    config = read_cluster_file(file)
    assert (config.replicas, config.replicas_per_machine, config.address) == (3, 1, "auto")
    assert config.access().keys == ("a-key-of-some-length",)


def test_every_file_is_named_in_the_readme() -> None:
    for folder in (SYSTEMD, EXAMPLES / "kuberay"):
        text = (folder / "README.md").read_text(encoding="utf-8")
        for file in folder.iterdir():
            name = file.stem if file.suffix == ".service" else file.name
            assert name in text or name == "README.md"
    text = (SYSTEMD / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in UNITS} <= set(re.findall(r"localgen-[a-z-]+", text))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_the_units(path: Path, tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("there is no systemd-analyze here")
    for unit in UNITS:  # with a program that is there
        text = re.sub(r"/opt/localgen/bin/\w+", "/bin/true", unit.read_text(encoding="utf-8"))
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        [verifier, "verify", str(tmp_path / path.name)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
