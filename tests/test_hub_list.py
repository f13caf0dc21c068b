"""`list`: names, aliases, unfinished downloads and disk use, against a hub on loopback."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from pull_fixtures import REPO, hub, random_bytes

from localgen.backends.units import format_size
from localgen.cli.main import run_command_line
from localgen.hub import pull
from localgen.hub.hf_client import repo_folder
from localgen.hub.packaged import BUILT_IN_PATH
from localgen.hub.unfinished import unfinished_downloads

__all__ = ["hub"]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's folders are too long for sockets
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", folder)
        yield


def test_list_shows_other_names_and_disk_use(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = "bartowski/Llama-3.2-1B-Instruct-GGUF"
    hub.add(
        repo, {f"Llama-3.2-1B-Instruct-{q}.gguf": random_bytes(50_000) for q in ("Q4_K_M", "Q8_0")}
    )
    for tag in ("", ":q8_0"):
        assert run_command_line(["pull", f"llama-1b{tag}"]) == 0
    assert run_command_line(["cp", "llama-1b:Q8_0", "mine"]) == 0
    capsys.readouterr()
    assert run_command_line(["list"]) == 0
    out, err = capsys.readouterr()
    head, *rows = [re.split(r" {3,}", line) for line in out.splitlines()]
    assert head == ["NAME", "SIZE", "SOURCE", "STATE", "ALSO"]
    assert rows[1:] == [
        [f"{repo}:Q4_K_M", "50.0 KB", "cache", "available", "llama3.2-1b"],
        [f"{repo}:Q8_0", "50.0 KB", "cache", "available", "llama3.2-1b:Q8_0, mine"],
    ]
    # both files have the same content, which is stored once
    assert err.startswith("50.0 KB in ")


def test_list_shows_unfinished_downloads(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = repo_folder(REPO) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("a" * 64 + ".incomplete")).write_bytes(b"x" * 1_000_000)
    assert run_command_line(["list"]) == 0
    err = capsys.readouterr().err
    assert ", plus 1.0 MB in unfinished downloads" in err
    assert f"{REPO}, 1.0 MB, left by another program; `localgen rm {REPO}` removes it\n" in err
    assert run_command_line(["rm", REPO, "--yes"]) == 0
    assert "1.0 MB freed" in capsys.readouterr().out
    assert list(blobs.iterdir()) == []


def test_rm_is_not_advised_where_it_would_remove_a_model(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["pull", REPO]) == 0
    blobs = repo_folder(REPO) / "blobs"
    (blobs / ("a" * 64 + ".b.incomplete")).write_bytes(b"x" * 1000)
    assert run_command_line(["list"]) == 0
    assert f"{REPO}, 1.0 KB, left by another program in {blobs}\n" in capsys.readouterr().err


def test_list_names_unfinished_downloads(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(
        REPO, {f"chat-Q4_K_M-0000{i}-of-00002.gguf": random_bytes(1_000_000, i) for i in (1, 2)}
    )
    plan = pull.plan_pull(REPO)

    def interrupt(downloaded_bytes: int) -> None:
        if downloaded_bytes > 1_200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.run_pull(plan, interrupt)
    done = plan.size_bytes - plan.remaining_bytes
    assert run_command_line(["list", "--json"]) == 0
    *_, record = json.loads(capsys.readouterr().out)
    assert (record["name"], record["state"]) == (f"{REPO}:Q4_K_M", "unfinished")
    assert (record["downloaded_bytes"], record["size_bytes"]) == (done, 2_000_000)
    assert run_command_line(["list"]) == 0
    out, err = capsys.readouterr()
    assert REPO not in out
    assert f"{REPO}:Q4_K_M, {format_size(done)} of 2.0 MB; run `localgen pull {REPO}:Q4_K_M`" in err
    assert run_command_line(["pull", REPO]) == 0
    capsys.readouterr()
    assert run_command_line(["list"]) == 0
    assert "resume" not in capsys.readouterr().err


def test_a_removed_download_is_not_listed(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(downloaded_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.run_pull(pull.plan_pull(REPO), interrupt)
    assert [download.name for download in unfinished_downloads()] == [f"{REPO}:Q4_K_M"]
    assert run_command_line(["rm", REPO, "--yes"]) == 0
    assert unfinished_downloads() == []


def test_list_shows_every_alias(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["pull", REPO]) == 0
    targets = {
        "whole": REPO, "tagged": f"{REPO}:q4_k_m", "mine": "tiny", "own": str(BUILT_IN_PATH),
        "future": "llama-8b", "other": "acme/Gone:Q8_0",
    }  # fmt: skip
    for alias, target in targets.items():
        assert run_command_line(["cp", target, alias]) == 0
    capsys.readouterr()
    assert run_command_line(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[f"{REPO}:Q4_K_M"]["also"] == ["whole", "tagged"]
    assert rows["tiny"]["also"] == ["mine", "own"]
    for alias, size in (("future", 4_920_739_232), ("other", None)):
        assert (rows[alias]["state"], rows[alias]["size_bytes"]) == ("not installed", size)
        assert rows[alias]["also"] == [targets[alias]]
    assert run_command_line(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["future", "4.9 GB", "alias", "not installed", "llama-8b"] in [
        re.split(r" {3,}", line) for line in lines
    ]


def test_a_file_is_listed_by_its_alias(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(random_bytes(5000))
    assert run_command_line(["cp", str(path), "filed"]) == 0
    capsys.readouterr()
    assert run_command_line(["list", "--json"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["path"] == str(path))
    assert (row["name"], row["state"], row["size_bytes"]) == ("filed", "available", 5000)
    path.unlink()
    assert run_command_line(["list", "--json"]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "filed")
    assert row["state"] == "not installed"
