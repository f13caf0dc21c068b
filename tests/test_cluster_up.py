"""What `localgen cluster up` starts: its model, and where that is found."""

from __future__ import annotations

import pytest

from localgen.cli import cluster as cluster_cli
from localgen.cluster import running
from localgen.cluster.config import ClusterConfig
from localgen.cluster.running import RunningCluster
from localgen.config import ServerSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ClusterConfig, str]]:
    """The configurations and the names of models with which clusters were started."""
    found = list[tuple[ClusterConfig, str]]()

    def start(config: ClusterConfig, model: str, settings: ServerSettings) -> RunningCluster:
        found.append((config, model))
        return RunningCluster(1, f"http://127.0.0.1:{config.port}", model, config.api_key_file)

    monkeypatch.setattr(running, "start", start)
    monkeypatch.setattr(running, "require_startable", lambda config, settings: None)
    return found


def up(*arguments: str) -> None:
    cluster_cli.group(["up", *arguments], standalone_mode=False)


def test_without_a_model_replicas_load_the_default_one(
    started: list[tuple[ClusterConfig, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "tiny")
    up()
    up("tiny")
    assert [(config.model, name) for config, name in started] == [("tiny", "tiny")] * 2
