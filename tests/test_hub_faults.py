"""Faults during a pull: one line, a clean cache, and the next try succeeds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from pull_fixtures import (
    CONTENT,
    Q4,
    REPO,
    assert_clean,
    environment,
    fetch,
    hub,
    impatient,
    random_bytes,
    unfinished,
)

from localgen.backends.errors import LocalgenError, ModelNotFound
from localgen.hub import pull
from localgen.hub.download import blob_path
from localgen.hub.hf_client import (
    AccessDenied,
    DiskFull,
    DownloadFailed,
    HubUnavailable,
    repo_folder,
)
from localgen.hub.resolve import resolve_model

__all__ = ["hub", "impatient"]


def test_wrong_hash_is_an_error_and_can_be_retried(hub: LoopbackHub) -> None:
    hub.faults.corrupt = 1
    with pytest.raises(
        DownloadFailed, match=r"chat-Q4_K_M\.gguf of acme/Chat-GGUF arrived damaged"
    ):
        fetch()
    assert unfinished() == []
    with pytest.raises(ModelNotFound):
        resolve_model(REPO)
    fetch()
    assert_clean()


def test_damaged_unfinished_file_is_discarded(hub: LoopbackHub) -> None:
    plan = pull.plan_pull(REPO)
    blob = blob_path(REPO, plan.files[0])
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".incomplete").write_bytes(b"not it")
    with pytest.raises(DownloadFailed, match="arrived damaged"):
        pull.run_pull(plan, lambda here: None)
    fetch()
    assert_clean()


@pytest.mark.parametrize("content", [b"<html>log in</html>" * 1000, b"GGUF" + b"\0" * 5000, b"GG"])
def test_file_that_is_not_gguf_is_removed(hub: LoopbackHub, content: bytes) -> None:
    hub.add(REPO, {Q4: content})
    with pytest.raises(DownloadFailed, match=rf"^{Q4} is not a valid GGUF file: .* was removed"):
        fetch()
    assert unfinished() == []
    with pytest.raises(ModelNotFound):
        resolve_model(REPO)


def test_first_bytes_reject_a_large_file(hub: LoopbackHub) -> None:
    hub.add(REPO, {Q4: b"x" * 50_000_000})
    hub.faults.hold = threading.Event()  # the rest would come after it
    with pytest.raises(DownloadFailed, match="does not begin with GGUF"):
        fetch()


def test_library_messages_are_hidden(hub: LoopbackHub, tmp_path: Path) -> None:
    # a new process: the library sets up its logger when it is imported
    hub.faults.drops = 1
    command = [sys.executable, "-m", "localgen.cli.main", "pull", REPO]
    env = environment(hub, tmp_path / "hub", tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stderr.splitlines()
    assert first.startswith(f"downloading {REPO}")
    assert second == "the connection was lost, resuming the download"
    assert "Error while downloading" not in done.stderr


def test_wrong_hash_of_a_small_file_is_an_error(hub: LoopbackHub) -> None:
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": random_bytes(5000)}
    hub.add("acme/Folder", files)
    hub.faults.corrupt = 1
    with pytest.raises(DownloadFailed, match=r"config\.json .* arrived damaged"):
        fetch("acme/Folder")
    fetch("acme/Folder")
    assert (
        resolve_model("acme/Folder").path.joinpath("config.json").read_bytes()
        == files["config.json"]
    )


def test_too_little_disk_space_is_rejected_before_downloading(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage(1, 1, 2_000_000))
        with pytest.raises(DiskFull, match=r"needs 3\.0 MB, .* has 2\.0 MB free"):
            fetch()
    assert hub.downloads == []
    fetch()
    assert_clean()


def test_downloaded_part_needs_no_disk_space(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, impatient: list[float]
) -> None:
    hub.faults.drops = 1000
    with pytest.raises(HubUnavailable):
        fetch()
    hub.faults.drops = 0
    usage = namedtuple("usage", "total used free")
    left = pull.plan_pull(REPO).remaining_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1, 1, left))
    fetch()
    assert_clean()


FULL_DISK = """
import sys
from pathlib import Path
from localgen.hub import pull
from localgen.hub.hf_client import DiskFull
import shutil
# pass the check before the first byte, as if another program filled the disk later
honest = shutil.disk_usage
shutil.disk_usage = lambda path: honest(path)._replace(free=1 << 40)
plan = pull.plan_pull("acme/Chat-GGUF")
try:
    pull.run_pull(plan, lambda here: None)
except DiskFull as error:
    print(error.message)
filler = Path(sys.argv[1]) / "filler"
print("unfinished", plan.remaining_bytes)
filler.unlink()
plan = pull.plan_pull("acme/Chat-GGUF")
pull.run_pull(plan, lambda here: None)
from localgen.hub.resolve import resolve_model
print("whole", resolve_model("acme/Chat-GGUF").size_bytes)
"""


def test_full_disk_during_a_pull_can_be_resumed(hub: LoopbackHub, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    program = tmp_path / "program.py"
    program.write_text(FULL_DISK)
    command = (
        f"mount -t tmpfs -o size=4m none {disk} && head -c 2500000 /dev/zero > {disk}/filler && "
        f"exec {sys.executable} {program} {disk}"
    )
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command],
        env=environment(hub, disk / "hub", tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said, left, whole = done.stdout.splitlines()
    assert "the disk is full" in said
    assert 0 < int(left.split()[1]) < len(CONTENT)
    assert whole == f"whole {len(CONTENT)}"
    assert hub.downloads[-1].start == len(CONTENT) - int(left.split()[1])


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (
            401,
            "RepoNotFound",
            ModelNotFound,
            "has no repository acme/Chat-GGUF; if it is private, set",
        ),
        (404, "RepoNotFound", ModelNotFound, "has no repository"),
        (401, "", AccessDenied, "rejects the token"),
        (
            401,
            "GatedRepo",
            AccessDenied,
            "gated: accept its terms on .*/acme/Chat-GGUF and set HF_TOKEN",
        ),
        (403, "GatedRepo", AccessDenied, "is gated"),
        (403, "", AccessDenied, "denies this token access to acme/Chat-GGUF"),
        (500, "", HubUnavailable, "status 500"),
        (404, "RevisionNotFound", ModelNotFound, "pull it again"),
    ],
)
def test_http_errors_have_their_class_and_message(
    hub: LoopbackHub, status: int, code: str, kind: type[LocalgenError], message: str
) -> None:
    hub.faults.denied[REPO] = (status, code)
    with pytest.raises(kind, match=message) as refused:
        fetch()
    assert "\n" not in refused.value.message
    hub.faults.denied.clear()
    fetch()
    assert_clean()


def test_gated_repository_needs_a_token_with_access(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {Q4: CONTENT}, gated={"right"})
    page = f"{hub.endpoint}/{REPO}"
    with pytest.raises(AccessDenied, match=f"accept its terms on {page} and set HF_TOKEN"):
        fetch()
    assert unfinished() == []
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(AccessDenied, match=r"is gated: .* with this token's account"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "right")
    fetch()
    assert_clean()
    (download,) = hub.downloads
    assert (download.host, download.authorization) == ("localhost", None)


def test_a_gated_repository_of_the_catalog_names_its_open_copy(hub: LoopbackHub) -> None:
    original = "meta-llama/Llama-3.2-1B-Instruct"
    files = {"config.json": b"{}", "model.safetensors": random_bytes(5000)}
    hub.add(original, files, gated=set())
    with pytest.raises(AccessDenied, match=r"or use the ungated copy unsloth/Llama-3\.2-1B"):
        fetch(original)


def test_busy_hub_is_retried_after_its_delay(hub: LoopbackHub, impatient: list[float]) -> None:
    hub.faults.busy, hub.faults.retry_after = 2, "7"
    said: list[str] = []
    plan = pull.plan_pull(REPO, said.append)
    assert impatient == [7.0, 7.0]
    assert len(said) == 2
    assert said[0].endswith("asks to wait 7 s")
    hub.faults.busy = 1
    pull.run_pull(plan, lambda here: None, said.append)
    assert impatient[-1] == 8.0  # the library adds a second
    assert "busy" in said[-1]
    assert_clean()


def test_busy_hub_is_given_up_at_last(hub: LoopbackHub, impatient: list[float]) -> None:
    hub.faults.busy = 1000
    with pytest.raises(HubUnavailable, match="still limits the request rate"):
        fetch()
    hub.faults.busy = 0
    fetch()
    assert_clean()


def test_server_that_is_not_a_hub_is_reported(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopback_hub.json.dumps", lambda _value: "<html>log in</html>")
    with pytest.raises(HubUnavailable, match="does not respond like a Hugging Face hub"):
        fetch()


def test_unreachable_hub_is_reported(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        HubUnavailable,
        match=r"cannot reach 127\.0\.0\.1:9 \(Connection refused\): .*; "
        r"llama-8b is bartowski/.*:Q4_K_M \(4\.9 GB\)",
    ):
        fetch("llama-8b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailable, match="HF_HUB_OFFLINE is set"):
        fetch("llama-8b")
    assert_clean()


@pytest.mark.parametrize("digest", ["../../x", "", "z" * 40, None])
def test_invalid_digest_in_a_listing_is_rejected(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, digest: object
) -> None:
    monkeypatch.setattr("loopback_hub._digest", lambda _content: digest or "a" * 39)
    with pytest.raises(HubUnavailable, match="is not a digest"):
        fetch()
    assert not repo_folder(REPO).exists()


def test_invalid_commit_is_rejected(hub: LoopbackHub) -> None:
    hub.repos[REPO].commit = "../../../x"
    with pytest.raises(HubUnavailable, match="is not a digest"):
        fetch()


def test_path_traversal_in_a_file_name_is_rejected(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.add(REPO, {"../../../../x-Q4_K_M.gguf": CONTENT})
    with pytest.raises(LocalgenError):
        fetch()
    assert list(tmp_path.rglob("x-Q4_K_M.gguf")) == []


def test_localgen_variables_take_precedence(hub: LoopbackHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path / "theirs", tmp_path)
    env |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "wrong"}
    env |= {"LOCALGEN_HF_ENDPOINT": hub.endpoint, "LOCALGEN_HF_TOKEN": "right"}
    env |= {"LOCALGEN_HF_HUB_CACHE": str(tmp_path / "ours")}
    hub.repos[REPO].gated = {"right"}
    command = [sys.executable, "-m", "localgen.cli.main", "pull", REPO]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ours" / "models--acme--Chat-GGUF").is_dir()
    assert not (tmp_path / "theirs").exists()
