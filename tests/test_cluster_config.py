"""cluster.toml, and what `localgen cluster` says when something is wrong."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localgen.backends.errors import InvalidRequest, LoadFailed, ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.client.endpoints import resolve_endpoint
from localgen.cluster import running
from localgen.cluster.config import ClusterConfig, read_cluster_file
from localgen.cluster.running import RunningCluster, hold_lock
from localgen.config import BadSetting, ServerSettings
from localgen.server.http.access import AccessPolicy, open_tcp_socket, read_api_keys


def config_of(tmp_path: Path, text: str) -> ClusterConfig:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path)


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(runtime_dir=tmp_path / "run", state_dir=tmp_path / "state")


def test_a_file_and_options(tmp_path: Path) -> None:
    config = config_of(tmp_path, 'model = "tiny"\nreplicas = 4\napi_key_file = "keys"\nspill = 2\n')
    assert config == ClusterConfig(
        model="tiny", replicas=4, spill=2, api_key_file=str(tmp_path / "keys")
    )
    assert config.with_options(replicas=3, model=None).replicas == 3
    assert config.with_options(replicas=3, model=None).model == "tiny"


def test_load_options(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[load]\nctx = 4096\nkv_disk = '1G'\ndraft = 'none'\n")
    assert config.load == LoadOptions(ctx=4096, kv_disk=1 << 30, draft="none")
    assert ClusterConfig.from_json(config.to_json()) == config
    changed = config.with_options(load=LoadOptions(ctx=2048, threads=1)).load
    assert changed == LoadOptions(ctx=2048, threads=1, kv_disk=1 << 30, draft="none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replicas = 0", "replicas must be 1 to 1000, not 0"),
        ("port = 70000", "port must be 1 to 65535, not 70000"),
        ("replica = 2", "unknown key 'replica'. Did you mean replicas"),
        ("xyz = 2", "unknown key 'xyz': there are address, allow_host, api_key_file, "),
        ("ctx = 4096", "unknown key 'ctx': it is a load option: put it under [load]"),
        ("[load]\nthread = 1", "unknown load option thread. Did you mean threads"),
        ('replicas = "2"', "replicas must be a whole number, not '2'"),
        ("replicas = true", "replicas must be a whole number, not True"),
        (
            "replicas = 4\nmax_replicas = 2",
            "from min_replicas (1) to max_replicas (2)",
        ),
        (
            "max_replicas = 4\nmin_replicas = 3",
            "from min_replicas (3) to max_replicas (4)",
        ),
        (
            "max_replicas = 2\nmin_replicas = 3",
            "min_replicas (3) is more than max_replicas (2)",
        ),
        ("min_replicas = 0", "min_replicas is for a number that changes: set max_replicas"),
        ("max_replicas = 2\nttft_slo_ms = 0", "ttft_slo_ms must be 1 to"),
        ('command = "vllm serve m"', "command must say where to listen: --host {host} --port"),
        ('command = "vllm serve \'m --port {port}"', "command: No closing quotation"),
        ('command = "vllm serve m --port {port}"', "command needs model: the name by which"),
        ('model = "m"\ncommand = "v {port}"\nprompt_replicas = 1', "prompt_replicas is for loc"),
        ('model = "m"\ncommand = "v {port}"\n[load]\nctx = 9', "put them into command"),
        ("share_prefixes = 1", "share_prefixes must be true or false, not 1"),
        ("share_prefixes = false\nprompt_replicas = 1", "prompt_replicas need share_prefixes"),
        ("[load]\nctx = 'a'", "load options: Expected `int | null`, got `str`"),
        ("[load]\ncontext = 1", "unknown load option context"),
        ("[load]\nctx = 0", "--ctx is 0, it must be at least"),
        ("[load]\nkv_disk = 'much'", "load.kv_disk"),
        ("[load]\nkv_listen = 'x:1'", "load.kv_listen is set by the cluster"),
        ("load = 1", "load must be a table of load options, not 1"),
        ("replicas_per_machine = 1", "replicas_per_machine is for a Ray cluster that runs"),
        ('address = "auto"\nreplicas_per_machine = 0', "replicas_per_machine must be 1 to 100"),
        ("timeout_s = 0", "timeout_s must be 0.001 to"),
        ("timeout_s = '1'", "timeout_s must be a number, not '1'"),
        ("keep_alive = 'long'", "keep_alive=long: give a time"),
        ("max_body = 'big'", "max_body=big: give a size"),
        ("rate_limit = '1,x'", "expected REQUESTS or REQUESTS,TOKENS"),
        ('model = "m"\ncommand = "v {port}"\nrate_limit = "0,9"', "tokens are counted by"),
        ('model = "m"\ncommand = "v {port}"\nkeep_alive = "1h"', "keep_alive is for localg"),
        ("model = 3", "model must be a string, not 3"),
        ("replicas =", "Invalid value"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadSetting) as error:
        config_of(tmp_path, text)
    assert error.value.message.startswith(f"{tmp_path}/cluster.toml: ")
    assert said in error.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"none\.toml: No such file"):
        read_cluster_file(tmp_path / "none.toml")


def test_other_machines_need_a_key() -> None:
    with pytest.raises(BadSetting, match=r"0\.0\.0\.0 is reachable .*: give --api-key-file"):
        ClusterConfig(host="0.0.0.0").access()
    with pytest.raises(BadSetting, match="with --address, give --api-key-file"):
        ClusterConfig(address="10.0.0.1:6379").access()


def test_limits_are_those_of_a_server() -> None:
    config = ClusterConfig(
        rate_limit="60,900", cors_origin="https://a, https://b", allow_host="c.d"
    )
    access = config.access()
    assert (access.rate_limit.requests, access.rate_limit.tokens) == (60, 900)
    assert access.cors_origins == ("https://a", "https://b")
    assert access.allows_host("c.d:80")
    with pytest.raises(BadSetting, match="expected REQUESTS"):
        ClusterConfig(rate_limit="many")


def test_settings_of_a_server(tmp_path: Path, settings: ServerSettings) -> None:
    text = """
        timeout_s = 2.5
        max_body = "1M"
        keep_alive = "1h"
        hang_timeout_s = 0
        stabilize = true
        record_trace = "trace.jsonl"
    """
    config = config_of(tmp_path, text)
    assert ClusterConfig.from_json(config.to_json()) == config
    assert config.access().max_body_bytes == 1 << 20
    assert config.server_settings(settings) == replace(
        settings,
        keep_alive_s=3600.0,
        hang_timeout_s=None,
        record_trace=tmp_path / "trace.jsonl",
    )
    assert ClusterConfig().server_settings(settings) == replace(settings, keep_model=True)
    of_user = replace(settings, keep_alive_s=60.0)
    assert ClusterConfig().server_settings(of_user) == of_user


def test_without_ray_the_remedy_is_said(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda _: None)
    with pytest.raises(LoadFailed, match=r"pip install 'localgen\[cluster\]'"):
        start(settings, 8080)


def test_a_port_that_is_taken(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "find_spec", lambda _: object())
    with open_tcp_socket(AccessPolicy(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadSetting, match=f"{port} is in use by another program"):
            start(settings, port)


def test_a_cluster_that_does_not_start_says_why(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; sys.exit('ValueError: no such address')"
    monkeypatch.setattr(running, "find_spec", lambda _: object())
    monkeypatch.setattr(running, "python_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(ServerUnavailable, match=r"did not start: no such address \(log: /"):
        start(settings, _free_port())
    assert RunningCluster.find(settings) is None


def test_a_cluster_that_starts_is_told_apart_from_one_that_was_killed(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda _: object())
    settings.create_dirs()
    stale = settings.runtime_dir / "cluster.json"
    stale.write_text('{"pid": 1, "url": "http://old", "model": "m", "api_key_file": null}')
    assert RunningCluster.find(settings) is None, "its lock is free"
    stale.unlink()
    with hold_lock(settings):
        assert RunningCluster.find(settings) is None
        with pytest.raises(ServerUnavailable, match="a cluster of yours is starting: wait"):
            start(settings, _free_port())
        with pytest.raises(ServerUnavailable, match=r"is starting: .* \(log: "):
            RunningCluster.get(settings)
    with pytest.raises(ServerUnavailable, match="no cluster runs: `localgen cluster up` starts"):
        RunningCluster.get(settings)


def test_a_cluster_is_found_and_ended(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = (
        "import time; from localgen.cluster.running import *\n"
        "lock = hold_lock(ServerSettings.from_environment())\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(settings.runtime_dir))
    monkeypatch.setattr(running, "find_spec", lambda _: object())
    monkeypatch.setattr(running, "python_command", lambda *_: [sys.executable, "-c", program])
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    keys.chmod(0o600)
    config = ClusterConfig(host="0.0.0.0", port=_free_port(), api_key_file=str(keys))
    started = running.start(config, "tiny", settings)
    assert started.url == f"http://127.0.0.1:{config.port}"
    assert RunningCluster.find(settings) == started
    with pytest.raises(ServerUnavailable, match=f"a cluster runs at {started.url}"):
        start(settings, _free_port())
    endpoint = resolve_endpoint("cluster")
    assert (endpoint.url, endpoint.model) == (f"{started.url}/v1", "tiny")
    assert endpoint.api_key() == "a-key-of-some-length"
    assert "a-key" not in repr(endpoint)
    running.stop(started, settings)
    assert RunningCluster.find(settings) is None
    with pytest.raises(InvalidRequest, match="no cluster of yours runs on this machine"):
        resolve_endpoint("cluster")


def start(settings: ServerSettings, port: int) -> RunningCluster:
    return running.start(ClusterConfig(port=port), "tiny", settings)


def _free_port() -> int:
    with open_tcp_socket(AccessPolicy(port=0)) as sock:
        return int(sock.getsockname()[1])


def test_the_gateway_is_called_by_these_names(tmp_path: Path) -> None:
    named = config_of(tmp_path, 'allow_host = "llm.example, Llm"').access()
    assert named.allows_host("llm.example:8080")
    assert named.allows_host("llm")
    assert not named.allows_host("other.example")
    assert not ClusterConfig().access().allows_host("llm.example")


@pytest.mark.parametrize(
    ("owner", "mode", "user", "refused"),
    [
        (0, 0o440, 1000, False),  # a secret that Kubernetes mounts for the pod's group
        (0, 0o640, 1000, False),
        (0, 0o444, 1000, True),
        (0, 0o460, 1000, True),
        (1000, 0o440, 1000, True),
        (0, 0o440, 0, True),
        (1000, 0o400, 1000, False),
    ],
)
def test_who_may_read_the_keys(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: int,
    mode: int,
    user: int,
    refused: bool,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_uid=owner, st_mode=mode))
    monkeypatch.setattr(os, "getuid", lambda: user)
    if refused:
        with pytest.raises(BadSetting, match="accessible to other users, chmod 600 it"):
            read_api_keys(keys)
    else:
        assert read_api_keys(keys) == ("a-key-of-some-length",)
