"""Pulling through huggingface_hub's own client from a hub on loopback."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from pull_fixtures import (
    CONTENT,
    Q4,
    REPO,
    assert_clean,
    fetch,
    hub,
    impatient,
    random_bytes,
    unfinished,
)

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound, OutOfMemory
from localgen.hub import pull
from localgen.hub.download import blob_path
from localgen.hub.hf_client import HubUnavailable, repo_folder
from localgen.hub.quant_choice import AvailableMemory
from localgen.hub.resolve import resolve_model

__all__ = ["hub", "impatient"]


def test_a_pull_ends_in_the_cache_as_the_library_lays_it_out(hub: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    plan = fetch()
    assert (plan.name, plan.size_bytes) == (f"{REPO}:Q4_K_M", len(CONTENT))
    assert_clean()
    (repo,) = scan_cache_dir(repo_folder(REPO).parent).repos
    assert [revision.refs for revision in repo.revisions] == [frozenset({"main"})]
    asked = len(hub.downloads)
    # other programs find it
    path = hf_hub_download(REPO, Q4, local_files_only=True)
    assert Path(path).read_bytes() == CONTENT
    assert fetch().is_cached
    assert len(hub.downloads) == asked == 1


def test_progress_counts_to_the_whole(hub: LoopbackHub) -> None:
    seen: list[int] = []
    pull.run_pull(pull.plan_pull(REPO), seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 5
    assert seen[-1] == len(CONTENT)


def test_broken_connection_is_resumed(hub: LoopbackHub, impatient: list[float]) -> None:
    hub.faults.drops = 1
    said: list[str] = []
    pull.run_pull(pull.plan_pull(REPO), lambda here: None, said.append)
    assert_clean()
    first, second = hub.downloads
    assert first.start == 0
    assert 0.25 * len(CONTENT) < second.start <= 0.4 * len(CONTENT)
    assert said == ["the connection was lost, resuming the download"]


def test_interrupted_pull_is_resumed_by_the_next(hub: LoopbackHub, impatient: list[float]) -> None:
    hub.faults.drops = 1000
    with pytest.raises(HubUnavailable, match=r"cannot reach 127\.0\.0\.1"):
        fetch()
    with pytest.raises(ModelNotFound):
        resolve_model(REPO)
    (part,) = unfinished()
    there = part.stat().st_size
    assert 0.25 * len(CONTENT) < there <= 0.4 * len(CONTENT)
    hub.faults.drops = 0
    plan = pull.plan_pull(REPO)
    assert plan.remaining_bytes == len(CONTENT) - there
    asked = len(hub.downloads)
    pull.run_pull(plan, lambda here: None)
    assert [request.start for request in hub.downloads[asked:]] == [there]
    assert_clean()


def test_server_without_ranges_restarts_the_file(hub: LoopbackHub, impatient: list[float]) -> None:
    hub.faults.drops, hub.faults.ignore_range = 1, True
    fetch()
    assert_clean()


def test_unfinished_file_that_is_too_long_is_discarded(hub: LoopbackHub) -> None:
    plan = pull.plan_pull(REPO)
    blob = blob_path(REPO, plan.files[0])
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".incomplete").write_bytes(b"x" * (len(CONTENT) + 1))
    pull.run_pull(plan, lambda here: None)
    assert_clean()


def test_missing_quantization_is_rejected(hub: LoopbackHub) -> None:
    hub.add(REPO, {"chat-Q5_K_M.gguf": CONTENT, "chat-Q8_0.gguf": CONTENT})
    with pytest.raises(
        ModelNotFound, match=r"no Q4_K_M\. Did you mean Q5_K_M.*Available: Q5_K_M \(3\.0 MB\), Q8_0"
    ):
        fetch()
    assert fetch(f"{REPO}:q8_0").name == f"{REPO}:Q8_0"
    assert resolve_model(REPO).name == f"{REPO}:Q8_0"
    fetch(f"hf.co/{REPO}:Q5_K_M")
    with pytest.raises(ModelNotFound, match="Q4_K_M is not installed"):
        resolve_model(REPO)


def test_auto_takes_the_best_that_fits(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"chat-{quant}.gguf": random_bytes(size) for quant, size in SIZES.items()}
    hub.add(REPO, files)
    monkeypatch.setattr(
        "localgen.hub.quant_choice.available_memory", lambda: AvailableMemory(ram_bytes=75_000_000)
    )
    plan = pull.plan_pull(f"{REPO}:auto")
    assert plan.name == f"{REPO}:Q6_K"
    assert plan.quant_reason.startswith("Q6_K needs 70.")
    assert "Q8_0 would need 7" in plan.quant_reason
    pull.run_pull(plan, lambda here: None)
    assert resolve_model(f"{REPO}:auto").name == f"{REPO}:Q6_K"
    monkeypatch.setattr(
        "localgen.hub.quant_choice.available_memory", lambda: AvailableMemory(ram_bytes=1_000_000)
    )
    with pytest.raises(OutOfMemory, match=r"the smallest, Q2_K, needs 6.*, 1\.0 MB are free"):
        pull.plan_pull(f"{REPO}:auto")


SIZES = {"Q2_K": 1_000_000, "Q6_K": 3_000_000, "Q8_0": 8_000_000, "F16": 12_000_000}


def test_shards_are_one_model(hub: LoopbackHub) -> None:
    shards = [random_bytes(1_000_000, seed) for seed in range(3)]
    hub.add(REPO, {f"Q4_K_M/c-Q4_K_M-0000{i + 1}-of-00003.gguf": s for i, s in enumerate(shards)})
    plan = pull.plan_pull(REPO)
    assert len(plan.files) == 3
    pull.run_pull(plan, lambda here: None)
    assert_clean(content=b"".join(shards))
    hub.add(REPO, {"c-Q4_K_M-00001-of-00002.gguf": shards[0]})
    with pytest.raises(ModelNotFound):
        pull.plan_pull(REPO)


def test_a_sharded_model_that_is_interrupted_keeps_its_whole_shards(
    hub: LoopbackHub, impatient: list[float]
) -> None:
    shards = [random_bytes(1_000_000, seed) for seed in range(2)]
    hub.add(REPO, {f"c-Q4_K_M-0000{i + 1}-of-00002.gguf": s for i, s in enumerate(shards)})
    plan = pull.plan_pull(REPO)

    def break_off(here: int) -> None:
        if here > 1_200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.run_pull(plan, break_off)
    with pytest.raises(ModelNotFound, match="2 shards, 1 missing"):
        resolve_model(REPO)
    asked, counts = len(hub.downloads), list[int]()
    there = plan.size_bytes - plan.remaining_bytes
    pull.run_pull(pull.plan_pull(REPO), counts.append)
    assert counts[0] == there, "hashing what is there is no download"
    assert counts == sorted(counts)
    (rest,) = hub.downloads[asked:]
    assert rest.path.endswith("00002-of-00002.gguf")
    assert rest.start > 0
    assert_clean(content=b"".join(shards))


def test_a_model_in_hugging_faces_format(hub: LoopbackHub) -> None:
    weights = random_bytes(200_000)
    files = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b"{}" * 4000,
        "model.safetensors": weights,
        "consolidated.safetensors": weights,
        "pytorch_model.bin": b"pickle" * 1000,
        "original/params.json": b"{}",
        "evil.py": b"import os",
        "README.md": b"# It\n",
    }
    hub.add("acme/Folder", files)
    fetch("acme/Folder")
    found = resolve_model("acme/Folder")
    assert (found.name, found.source, found.is_gguf) == ("acme/Folder", "cache", False)
    assert found.size_bytes == len(weights)
    assert {path.name for path in found.path.rglob("*") if path.is_file()} == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    with pytest.raises(ModelNotFound, match=r"no \.gguf files, so no Q8_0"):
        fetch("acme/Folder:Q8_0")


def test_repository_without_a_model_is_rejected(hub: LoopbackHub) -> None:
    hub.add("acme/Pickles", {"pytorch_model.bin": b"pickle" * 1000, "config.json": b"{}"})
    with pytest.raises(
        ModelNotFound, match=r"neither \.gguf files nor config\.json with safetensors"
    ):
        fetch("acme/Pickles")


@pytest.mark.parametrize("name", ["tiny", "./x", "../../etc/passwd", "x.gguf"])
def test_names_that_are_not_on_the_hub_are_rejected(hub: LoopbackHub, name: str) -> None:
    with pytest.raises(InvalidRequest):
        pull.plan_pull(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["lama-8b", "a/../b", "a/b/c", "user/", "/x:y", "a b/c"])
def test_invalid_names_are_rejected(hub: LoopbackHub, name: str) -> None:
    with pytest.raises(LocalgenError):
        pull.plan_pull(name)
    assert hub.requests == []


def test_two_pulls_are_one_download(hub: LoopbackHub) -> None:
    hub.faults.hold = threading.Event()
    plan = pull.plan_pull(REPO)
    first = threading.Thread(target=pull.run_pull, args=(plan, lambda here: None))
    first.start()
    assert hub.faults.hold.wait(10)
    seen: list[int] = []
    second = threading.Thread(target=pull.run_pull, args=(pull.plan_pull(REPO), seen.append))
    second.start()
    deadline = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    # it sees the progress of the other one
    assert 0.25 * len(CONTENT) < seen[-1] <= 0.5 * len(CONTENT) + (1 << 16)
    hub.faults.release.set()
    first.join(20)
    second.join(20)
    assert seen[-1] == len(CONTENT)
    assert len(hub.downloads) == 1
    assert_clean()


def test_lock_of_the_library_is_held_during_a_pull(hub: LoopbackHub) -> None:
    from huggingface_hub import hf_hub_download

    hub.faults.hold = threading.Event()
    ours = threading.Thread(target=fetch)
    ours.start()
    assert hub.faults.hold.wait(10)
    theirs = threading.Thread(target=hf_hub_download, args=(REPO, Q4))
    theirs.start()
    time.sleep(0.3)
    hub.faults.release.set()
    ours.join(20)
    theirs.join(20)
    assert len(hub.downloads) == 1
    assert_clean()


def test_a_new_revision_replaces_what_the_name_means(hub: LoopbackHub) -> None:
    fetch()
    newer = random_bytes(1_000_000, seed=9)
    hub.add(REPO, {Q4: newer}, commit="d" * 40)
    fetch()
    assert_clean(content=newer)
    digest = hashlib.sha256(newer).hexdigest()
    assert resolve_model(REPO).path.resolve().name == digest
