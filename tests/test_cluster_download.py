"""A model that a machine lacks is downloaded once, whichever of its replicas is first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from loopback_hub import LoopbackHub
from pull_fixtures import CONTENT, REPO, hub

from localgen.backends.errors import ModelNotFound
from localgen.backends.model_info import LoadOptions
from localgen.cluster.config import ClusterConfig
from localgen.cluster.model_download import ensure_installed, model_name, require_available
from localgen.hub.hf_client import DiskFull, cache_folder
from localgen.hub.resolve import resolve_model

__all__ = ["hub"]
CONFIG = ClusterConfig(model=REPO)
REPLICA = f"""
from localgen.cluster.config import ClusterConfig
from localgen.cluster.model_download import ensure_installed
ensure_installed(ClusterConfig(model={REPO!r}), print)
"""


def test_replicas_of_a_machine_share_a_download(hub: LoopbackHub) -> None:
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache_folder()),
    }
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", REPLICA], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [each.communicate(timeout=60)[0] for each in replicas]
    assert [each.returncode for each in replicas] == [0, 0, 0], said
    assert resolve_model(REPO).path.read_bytes() == CONTENT
    assert len(hub.downloads) == 1
    assert f"{REPO}: 0 B of 3.0 MB downloaded" in "".join(said)


def test_what_is_missing_is_no_problem_if_it_can_be_downloaded(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_available(CONFIG)
    assert model_name(CONFIG) == f"{REPO}:Q4_K_M"
    with pytest.raises(ModelNotFound, match="acme/other"):
        require_available(ClusterConfig(model="acme/other"))
    with pytest.raises(ModelNotFound, match="acme/draft"):
        require_available(ClusterConfig(model="tiny", load=LoadOptions(draft="acme/draft")))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFull, match="make room"):
        require_available(CONFIG)


def test_the_name_is_the_same_before_and_after_the_download(hub: LoopbackHub) -> None:
    before = model_name(CONFIG)
    lines: list[str] = []
    ensure_installed(CONFIG, lines.append)
    assert model_name(CONFIG) == before
    ensure_installed(ClusterConfig(model="tiny", load=LoadOptions(draft="none")), lines.append)
    assert lines == [f"{REPO}: 0 B of 3.0 MB downloaded", f"{REPO} is downloaded"]
