"""`pull`, `list`, `show`, `rm` and `cp` against a hub on loopback."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Piped, Terminal
from loopback_hub import LoopbackHub
from pull_fixtures import CONTENT, Q4, REPO, environment, hub, random_bytes

from localgen.cli import errors
from localgen.cli.main import run_command_line
from localgen.hub.aliases import load_aliases
from localgen.hub.hf_client import repo_folder
from localgen.hub.models_file import read_models_file
from localgen.hub.packaged import BUILT_IN_PATH
from localgen.hub.resolve import installed_models, resolve_model

__all__ = ["hub"]
TINY = "acme/Tiny-GGUF"


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's folders are too long for sockets
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", folder)
        monkeypatch.setattr(sys, "stdin", Piped(b""))
        yield


def cached() -> list[str]:
    return [file.name for file in installed_models() if file.source == "cache"]


def test_pull_downloads_once(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["pull", REPO]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"downloading {REPO}:Q4_K_M, 3.0 MB",
        f"{REPO}:Q4_K_M: 3.0 MB in 0 s",
        f"{REPO}:Q4_K_M downloaded",
    ]
    assert cached() == [f"{REPO}:Q4_K_M"]
    assert run_command_line(["pull", f"hf.co/{REPO}"]) == 0
    assert capsys.readouterr().err == f"{REPO}:Q4_K_M is up to date\n"
    assert len(hub.downloads) == 1


@pytest.mark.parametrize(
    ("model", "status", "complaint"),
    [
        (
            "acme/Nothing",
            errors.EXIT_STATUS_BY_CODE["model_not_found"],
            "has no repository acme/Nothing",
        ),
        (f"{REPO}:Q9", errors.EXIT_STATUS_BY_CODE["model_not_found"], "Q4_K_M (3.0 MB)"),
        ("acme/Gated", errors.EXIT_STATUS_BY_CODE["access_denied"], "is gated"),
        ("lama-8b", errors.EXIT_STATUS_BY_CODE["model_not_found"], "Did you mean llama-8b"),
        (
            "zzz",
            errors.EXIT_STATUS_BY_CODE["model_not_found"],
            "`localgen search` lists its models",
        ),
        ("acme/Page", errors.EXIT_STATUS_BY_CODE["download_failed"], "does not begin with GGUF"),
        ("tiny", errors.EXIT_STATUS_BY_CODE["invalid_request"], "nothing to pull"),
    ],
)
def test_a_pull_that_fails_is_one_line(
    hub: LoopbackHub,
    capsys: pytest.CaptureFixture[str],
    model: str,
    status: int,
    complaint: str,
) -> None:
    hub.add("acme/Gated", {Q4: CONTENT}, gated=set())
    hub.add("acme/Page", {Q4: b"<html>log in</html>" * 1000})
    assert run_command_line(["pull", model]) == status
    *_, last = lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 2
    assert last.startswith("localgen: ")
    assert complaint in last
    assert "Installed" not in last  # which does not help to pull
    assert cached() == []
    assert list(repo_folder("x/y").parent.glob("*/blobs/*")) == []


def test_pull_without_network(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command_line(["pull", REPO]) == 0
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    assert run_command_line(["pull", REPO]) == 0
    assert f"{REPO} is installed; cannot check for updates: " in capsys.readouterr().err
    assert run_command_line(["pull", "llama-8b"]) == errors.EXIT_STATUS_BY_CODE["hub_unavailable"]
    assert re.search(r"cannot reach .*bartowski/.*\(4\.9 GB\)$", capsys.readouterr().err)
    assert run_command_line(["show", "llama-8b", "--quants"]) == 0
    out, err = capsys.readouterr()
    assert "Q8_0" in out
    assert "using the sizes of the catalog" in err


def test_ctrl_c_keeps_what_came_and_says_how_to_go_on(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults.hold = threading.Event()
    pulling = subprocess.Popen(
        [sys.executable, "-m", "localgen.cli.main", "pull", REPO],
        env=environment(hub, tmp_path / "hub", tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub.faults.hold.wait(30)
    part = [0]
    deadline = time.monotonic() + 10
    while part[0] < 1_000_000 and time.monotonic() < deadline:
        part = [p.stat().st_size for p in repo_folder(REPO).glob("blobs/*.incomplete")] or [0]
        time.sleep(0.02)
    pulling.send_signal(signal.SIGINT)
    _, err = pulling.communicate(timeout=20)
    assert pulling.returncode == errors.INTERRUPTED
    # bytes that were in transit at Ctrl+C
    part = [p.stat().st_size for p in repo_folder(REPO).glob("blobs/*.incomplete")]
    assert re.fullmatch(
        rf"stopped at 1\.\d MB of 3\.0 MB: localgen pull {REPO} resumes the download",
        err.splitlines()[-1],
    )
    hub.faults.release.set()
    assert run_command_line(["pull", REPO]) == 0
    assert hub.downloads[-1].start == part[0] > 1_000_000


def test_pull_shows_a_progress_bar_on_a_terminal(hub: LoopbackHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path / "hub", tmp_path) | {"TERM": "xterm", "COLUMNS": "100"}
    status, shown = at_terminal(["pull", REPO], env)
    assert status == 0
    assert re.search(r"━━.*3\.0/3\.0 MB.*/s", shown)
    assert f"{REPO}:Q4_K_M downloaded" in shown


def at_terminal(arguments: list[str], env: dict[str, str], typed: bytes = b"") -> tuple[int, str]:
    """Run a command on a pseudo-terminal; returns its status and output."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "localgen.cli.main", *arguments],
        env=env,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    os.write(leader, typed)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 0.5)
        try:
            block = os.read(leader, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        shown += block
        if not block and process.poll() is not None:
            break
    os.close(leader)
    return process.wait(10), shown.decode(errors="replace")


def test_show_a_file(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(TINY, {"tiny-F16.gguf": BUILT_IN_PATH.read_bytes()})
    assert run_command_line(["pull", TINY]) == 0
    capsys.readouterr()
    assert run_command_line(["show", TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["source"], found["files"]) == (f"{TINY}:F16", "cache", 1)
    assert found["size_bytes"] == BUILT_IN_PATH.stat().st_size
    assert (found["architecture"], found["quantization"]) == ("llama", "F16")
    assert (found["params"], found["vocab"], found["context"]) == (5_770_496, 4096, 2048)
    assert found["sampling"] == {"temp": 0.0}
    assert (found["bits_per_weight"], found["tensor_types"]) == (16.01, ["F16", "F32"])
    assert run_command_line(["show", TINY, "--template"]) == 0
    assert capsys.readouterr().out == found["chat_template"] + "\n"
    assert run_command_line(["show", TINY]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^chat template +198 characters", out, re.MULTILINE)
    assert re.search(r"^params +5,770,496$", out, re.MULTILINE)


def test_show_a_folder(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    source = BUILT_IN_PATH.parent / "tiny"
    hub.add("acme/Tiny", {path.name: path.read_bytes() for path in source.iterdir()})
    assert run_command_line(["pull", "acme/Tiny"]) == 0
    capsys.readouterr()
    assert run_command_line(["show", "acme/Tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "LlamaForCausalLM"
    assert (found["context"], found["vocab"], found["quantization"]) == (2048, 4096, "bfloat16")
    assert "im_start" in found["chat_template"]
    assert "bits_per_weight" not in found


def test_show_what_is_not_here(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["show", "llama-8b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["here"] is False
    assert found["fetches"].endswith(":Q4_K_M (4.9 GB)")
    assert (found["context"], found["license"]) == (131_072, "llama3.1")
    assert (
        run_command_line(["show", "acme/Nothing"]) == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    )
    assert (
        run_command_line(["show", "llama-8b", "--template"])
        == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    )
    assert hub.requests == []


def test_show_quants(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(
        REPO, {f"chat-{q}.gguf": random_bytes(n) for q, n in (("Q4_K_M", 50_000), ("Q8_0", 90_000))}
    )
    assert run_command_line(["pull", REPO]) == 0
    capsys.readouterr()
    assert run_command_line(["show", REPO, "--quants"]) == 0
    head, first, second, why = capsys.readouterr().out.splitlines()
    assert head.split() == ["QUANT", "SIZE", "NEEDS", "RUNS", "ON", "LOCAL"]
    assert re.split(r" {3,}", first)[:2] == ["Q8_0", "90.0 KB"]
    assert first.endswith("<- auto")
    assert re.split(r" {3,}", second)[-1] == "yes"
    assert why.startswith("Q8_0 needs ")
    assert run_command_line(["show", REPO, "--quants", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["quant"], row["auto"], row["here"]) for row in rows] == [
        ("Q8_0", True, False),
        ("Q4_K_M", False, True),
    ]


def test_rm_takes_one_model_and_leaves_the_others(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {Q4: CONTENT, "chat-Q8_0.gguf": random_bytes(50_000), "copy-Q2_K.gguf": CONTENT})
    for tag in ("Q4_K_M", "Q8_0", "Q2_K"):
        assert run_command_line(["pull", f"{REPO}:{tag}"]) == 0
    hub.repos[REPO].commit = "d" * 40
    assert run_command_line(["pull", f"{REPO}:Q4_K_M"]) == 0
    capsys.readouterr()
    # another model has the same content
    assert run_command_line(["rm", f"{REPO}:Q4_K_M", "-y"]) == 0
    assert capsys.readouterr().out == f"{REPO}:Q4_K_M removed, 0 B freed\n"
    assert cached() == [f"{REPO}:Q8_0", f"{REPO}:Q2_K"]
    assert run_command_line(["rm", f"{REPO}:Q2_K", "-y"]) == 0
    assert capsys.readouterr().out == f"{REPO}:Q2_K removed, 3.0 MB freed\n"
    assert cached() == [f"{REPO}:Q8_0"]
    assert run_command_line(["rm", f"{REPO}:Q8_0", "-y"]) == 0
    assert not repo_folder(REPO).exists()
    assert run_command_line(["rm", REPO, "-y"]) == errors.EXIT_STATUS_BY_CODE["model_not_found"]


def test_rm_leaves_copies_of_the_repository(hub: LoopbackHub) -> None:
    """They have the same commits."""
    repos = [f"owner-{number}/Chat" for number in range(6)]
    for repo in repos:
        hub.add(repo, {Q4: CONTENT})
        assert run_command_line(["pull", f"{repo}:Q4_K_M"]) == 0
    for count, repo in enumerate(repos, 1):
        assert run_command_line(["rm", f"{repo}:Q4_K_M", "-y"]) == 0
        assert cached() == [f"{each}:Q4_K_M" for each in repos[count:]]


@pytest.mark.parametrize("linked", ["snapshot", "blob", "repository"])
@pytest.mark.parametrize("has_other", [False, True])
def test_rm_frees_nothing_outside_of_the_cache(
    hub: LoopbackHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    linked: str,
    has_other: bool,
) -> None:
    """A model of the cache may be a link to a file elsewhere, which stays."""
    hub.add(REPO, {Q4: CONTENT, "chat-Q8_0.gguf": random_bytes(50_000)})
    for tag in ("Q4_K_M", "Q8_0")[: 1 + has_other]:
        assert run_command_line(["pull", f"{REPO}:{tag}"]) == 0
    folder = repo_folder(REPO)
    (entry,) = folder.glob(f"snapshots/*/{Q4}")
    elsewhere = tmp_path / "elsewhere"
    moved = {"snapshot": entry.resolve(), "blob": entry.resolve(), "repository": folder}[linked]
    moved.rename(elsewhere)
    link = entry if linked == "snapshot" else moved
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere)
    capsys.readouterr()
    assert run_command_line(["rm", f"{REPO}:Q4_K_M", "-y"]) == 0
    assert elsewhere.exists()
    shown = capsys.readouterr().out
    if linked == "repository" and has_other:  # the folder of the repository is in use
        assert shown == f"{REPO}:Q4_K_M removed, 3.0 MB freed\n"
    else:
        assert "removed, 0 B freed; 3.0 MB outside of the cache are kept" in shown
    assert cached() == [f"{REPO}:Q8_0"] * has_other


def test_rm_asks(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command_line(["pull", REPO]) == 0
    assert run_command_line(["rm", REPO]) == errors.EXIT_STATUS_BY_CODE["invalid_request"]
    assert "--yes" in capsys.readouterr().err
    for typed, status, left in ((b"n\n", 1, 1), (b"y\n", 0, 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        assert run_command_line(["rm", REPO]) == status
        assert f"Remove {REPO}:Q4_K_M (3.0 MB)?" in capsys.readouterr().err
        assert len(cached()) == left


@pytest.mark.parametrize("kind", ["alias", "preset"])
def test_rm_of_a_name_asks_too(
    hub: LoopbackHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    add = ["cp", "tiny", "mine"] if kind == "alias" else ["preset", "add", "mine", "tiny"]
    assert run_command_line(add) == 0
    assert run_command_line(["rm", "mine"]) == errors.EXIT_STATUS_BY_CODE["invalid_request"]
    assert "--yes" in capsys.readouterr().err
    for typed, status, left in ((b"n\n", 1, {"mine": "tiny"}), (b"y\n", 0, {})):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        assert run_command_line(["rm", "mine"]) == status
        assert f"Remove the {kind} mine of tiny?" in capsys.readouterr().err
        assert read_models_file().models == left


def test_rm_of_a_loaded_model_is_rejected(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from localgen.client import RunningModel

    loaded = RunningModel(f"{REPO}:Q4_K_M", "a1", 1, "100% CPU", 2048, 299.0, 0)
    monkeypatch.setattr("localgen.client.LocalClient.running_models", lambda _client: [loaded])
    assert run_command_line(["pull", REPO]) == 0
    assert run_command_line(["rm", REPO, "-y"]) == errors.EXIT_STATUS_BY_CODE["model_busy"]
    assert f"localgen stop {REPO}:Q4_K_M" in capsys.readouterr().err
    assert cached() == [f"{REPO}:Q4_K_M"]


@pytest.mark.parametrize("model", ["tiny", "./x.gguf"])
def test_rm_leaves_what_is_not_in_the_cache(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.gguf").write_bytes(b"x")
    assert run_command_line(["rm", model, "-y"]) == errors.EXIT_STATUS_BY_CODE["invalid_request"]
    assert Path("x.gguf").exists()
    assert BUILT_IN_PATH.exists()


def test_cp_and_rm_of_a_name(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["pull", REPO]) == 0
    assert run_command_line(["cp", REPO, "work"]) == 0
    assert run_command_line(["cp", "work", "other"]) == 0
    assert load_aliases() == {"work": REPO, "other": REPO}
    assert resolve_model("work").name == f"{REPO}:Q4_K_M"
    assert run_command_line(["rm", "work", "-y"]) == 0
    assert load_aliases() == {"other": REPO}
    assert cached() == [f"{REPO}:Q4_K_M"]
    capsys.readouterr()
    assert (
        run_command_line(["cp", "nothing", "work"]) == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    )
    assert run_command_line(["cp", REPO, "tiny"]) == errors.EXIT_STATUS_BY_CODE["invalid_request"]
    assert run_command_line(["cp", REPO, "a/b"]) == errors.EXIT_STATUS_BY_CODE["invalid_request"]
    assert load_aliases() == {"other": REPO}


def test_rm_of_a_name_tells_what_is_kept(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["cp", "tiny", "mine"]) == 0
    assert run_command_line(["cp", "llama-8b", "big"]) == 0
    capsys.readouterr()
    assert run_command_line(["rm", "mine", "-y"]) == run_command_line(["rm", "big", "-y"]) == 0
    out = capsys.readouterr().out
    assert out == "mine is no longer an alias; tiny is kept\nbig is no longer an alias\n"


def test_cp_of_a_path_is_absolute(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(BUILT_IN_PATH.read_bytes())
    assert run_command_line(["cp", "m.gguf", "mine"]) == 0
    assert load_aliases() == {"mine": str(tmp_path / "m.gguf")}


@pytest.mark.parametrize("size", [1, -1_000])
def test_cp_of_a_damaged_file_is_rejected(
    hub: LoopbackHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(BUILT_IN_PATH.read_bytes()[:size])
    assert run_command_line(["cp", "m.gguf", "mine"]) != 0
    assert "m.gguf" in capsys.readouterr().err
    assert load_aliases() == {}


@pytest.fixture
def live(hub: LoopbackHub, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a user whose server ends with the test."""
    hub.add(TINY, {"tiny-F16.gguf": BUILT_IN_PATH.read_bytes()})
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        env = environment(hub, tmp_path / "hub", tmp_path) | {"LOCALGEN_RUNTIME_DIR": folder}
        yield env
        command = [sys.executable, "-m", "localgen.cli.main", "stop"]
        subprocess.run(command, env=env, capture_output=True, timeout=60)


def test_pull_then_run(live: dict[str, str]) -> None:
    def localgen(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "localgen.cli.main", *arguments]
        return subprocess.run(
            command, env=live, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )

    ask = ("run", TINY, "What is 17 + 25?", "--temp", "0", "-n", "32")
    refused = localgen("run", "llama-8b", "x")
    assert refused.returncode == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    assert "localgen pull llama-8b downloads bartowski" in refused.stderr
    assert localgen(*ask).returncode == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    pulled = localgen("pull", TINY)
    assert pulled.returncode == 0, pulled.stderr
    answered = localgen(*ask)
    assert answered.returncode == 0, answered.stderr
    assert "42" in answered.stdout
    busy = localgen("rm", TINY, "--yes")
    assert busy.returncode == errors.EXIT_STATUS_BY_CODE["model_busy"]
    assert localgen("stop", f"{TINY}:F16").returncode == 0
    assert localgen("rm", TINY, "--yes").returncode == 0


def test_on_a_terminal_run_offers_to_pull(live: dict[str, str]) -> None:
    ask = ["run", TINY, "What is 17 + 25?", "--temp", "0", "-n", "32"]
    status, shown = at_terminal(ask, live, typed=b"n\n")
    assert status == 1
    assert "Download it now?" in shown
    status, shown = at_terminal(ask, live, typed=b"y\n")
    assert status == 0, shown
    assert f"{TINY}:F16 downloaded" in shown
    assert "42" in shown
