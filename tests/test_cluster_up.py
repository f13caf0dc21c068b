"""What `localgen cluster up` starts: its model, and where that is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from localgen.cli import cluster as cluster_cli
from localgen.client.endpoints import Endpoint, add_endpoint
from localgen.cluster import running
from localgen.cluster.config import ClusterConfig
from localgen.cluster.running import RunningCluster
from localgen.config import ServerSettings
from localgen.hub.packaged import packaged_model


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[ClusterConfig, str]]:
    """The configurations and the names of models with which clusters were started."""
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))
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


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of a file of settings, and the current one; each has m.gguf and d.gguf."""
    found = tmp_path / "settings", tmp_path / "current"
    for folder in found:
        folder.mkdir()
        for name in ("m.gguf", "d.gguf"):
            (folder / name).symlink_to(packaged_model("tiny").path)
    monkeypatch.chdir(found[1])
    return found


def test_relative_paths_of_models_are_no_longer_so_for_other_machines(
    started: list[tuple[ClusterConfig, str]], folders: tuple[Path, Path]
) -> None:
    """Those of the file start in its folder, and those of options in the current one."""
    settings, current = folders
    file = settings / "cluster.toml"
    file.write_text('model = "./m.gguf"\n[load]\ndraft = "d.gguf"\n')
    up("-f", str(file))
    up("-f", str(file), "m.gguf", "--draft", "./d.gguf")
    up("tiny", "--draft", "ngram")
    found = [(config.model, config.load.draft) for config, _ in started]
    assert found == [
        (str(settings / "m.gguf"), str(settings / "d.gguf")),
        (str(current / "m.gguf"), str(current / "d.gguf")),
        ("tiny", "ngram"),
    ]


def test_the_model_of_another_engine_is_only_a_name(
    started: list[tuple[ClusterConfig, str]], folders: tuple[Path, Path]
) -> None:
    settings, _ = folders
    file = settings / "cluster.toml"
    file.write_text('model = "m.gguf"\ncommand = "llama-server -m {port}"\n')
    up("-f", str(file))
    up("-f", str(file), "d.gguf")
    assert [name for _, name in started] == ["m.gguf", "d.gguf"]


def test_a_name_that_another_server_has_is_not_said(
    started: list[tuple[ClusterConfig, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    up("tiny", "--port", "8123")
    add_endpoint(Endpoint("http://llm.example/v1", "cluster"))
    up("tiny", "--port", "8123")
    url = "http://127.0.0.1:8123"
    expected = [f"{url} answers: localgen chat --url {name}" for name in ("cluster", url)]
    assert capsys.readouterr().out.splitlines() == expected
