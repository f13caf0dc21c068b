"""From names to files: paths, shards, and the Hugging Face cache on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.model_files import ModelFile, shards_of, stem_of
from localgen.hub import packaged
from localgen.hub.cache import cached_models
from localgen.hub.resolve import installed_models, name_for_server, resolve_model

REVISION = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    # huggingface_hub reads its variables at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def put(cache: Path, repo: str, *files: str, revision: str = REVISION) -> Path:
    """Write files of a repository in huggingface_hub's layout; returns the snapshot's folder."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / revision
    for file in files:
        blob = root / "blobs" / file.replace("/", "_")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.encode())
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(revision)
    return snapshot


@pytest.fixture
def filled(cache: Path) -> Path:
    put(cache, "acme/Chat-8B-GGUF", "chat-8b-Q4_K_M.gguf", "chat-8b-Q8_0.gguf", "mmproj-F16.gguf")
    put(cache, "acme/Big", "BF16/big-BF16-00001-of-00002.gguf", "BF16/big-BF16-00002-of-00002.gguf")
    put(cache, "acme/Only8", "only-Q8_0.gguf", "README.md")
    put(cache, "acme/Torch", "model.safetensors")
    put(cache, "acme/Folder", "config.json", "model.safetensors")
    return cache


def test_stems_and_shards() -> None:
    assert stem_of(Path("/m/a-Q4_K_M.gguf")) == "a-Q4_K_M"
    assert stem_of(Path("/m/a-00002-of-00003.gguf")) == "a"
    assert [shard.name for shard in shards_of(Path("/m/a-00002-of-00003.gguf"))] == [
        "a-00001-of-00003.gguf",
        "a-00002-of-00003.gguf",
        "a-00003-of-00003.gguf",
    ]


def test_any_shard_resolves_to_all(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(b"x" * number)
    for number in (1, 2, 3):
        found = resolve_model(str(tmp_path / f"m-0000{number}-of-00003.gguf"))
        assert found.name == "m"
        assert found.path.name == "m-00001-of-00003.gguf"
        assert found.size_bytes == 6
        assert len(found.shards) == 3
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"3 shards, 1 missing: .*m-00002-of-00003"):
        resolve_model(str(tmp_path / "m-00001-of-00003.gguf"))


def test_paths_that_are_not_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no file") as missing:
        resolve_model(str(tmp_path / "nothing.gguf"))
    assert missing.value.param == "model"
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelNotFound, match=r"has neither \.gguf files"):
        resolve_model(str(tmp_path))


def test_unknown_home_folder_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="no file"):
        resolve_model("~nobody-here/model.gguf")
    assert str(name_for_server("~nobody-here/x")).endswith("/~nobody-here/x")


def test_folder_with_one_model_resolves(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"x")
    assert resolve_model(str(tmp_path)).name == "a"
    (tmp_path / "b.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"several models, choose one: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_built_in_model_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "BUILT_IN_PATH", tmp_path / "tiny.gguf")
    with pytest.raises(ModelNotFound, match=r"built-in model .* is missing"):
        resolve_model(None)
    (tmp_path / "tiny.gguf").write_bytes(b"x")
    assert resolve_model(None) == resolve_model("tiny")
    assert resolve_model(None).name == "tiny"
    assert resolve_model(None).source == "built-in"


@pytest.mark.parametrize(
    "name",
    [
        "acme/Chat-8B-GGUF",
        "acme/chat-8b-gguf:q4_k_m",
        "hf.co/acme/Chat-8B-GGUF:Q4_K_M",
        "https://huggingface.co/acme/Chat-8B-GGUF",
        "chat-8b-Q4_K_M",
        "CHAT-8B-q4_k_m",
    ],
)
def test_cached_model_resolves_by_any_spelling(filled: Path, name: str) -> None:
    found = resolve_model(name)
    assert found.name == "acme/Chat-8B-GGUF:Q4_K_M"
    assert found.path.name == "chat-8b-Q4_K_M.gguf"
    assert found.source == "cache"


def test_quantization_tags_resolve(filled: Path) -> None:
    assert resolve_model("acme/Chat-8B-GGUF:q8_0").path.name == "chat-8b-Q8_0.gguf"
    assert len(resolve_model("acme/Big:bf16").shards) == 2
    assert resolve_model("acme/Only8").name == "acme/Only8:Q8_0"
    with pytest.raises(
        ModelNotFound, match=r"Only8: Q4_K_M is not installed\. Installed: acme/Only8:Q8_0"
    ):
        resolve_model("acme/Only8:Q4_K_M")
    with pytest.raises(ModelNotFound, match="Q2_K is not installed"):
        resolve_model("acme/Chat-8B-GGUF:Q2_K")


def test_unknown_name_gets_suggestions(filled: Path) -> None:
    with pytest.raises(
        ModelNotFound, match=r"Did you mean .*acme/Chat-8B-GGUF:Q4_K_M.*\? Installed"
    ) as unknown:
        resolve_model("acme/Chat-7B-GGUF")
    assert "acme/Only8:Q8_0" in unknown.value.message
    with pytest.raises(ModelNotFound, match="Did you mean tiny"):
        resolve_model("tinny")
    with pytest.raises(ModelNotFound, match="Model 'acme/Torch' not found"):
        resolve_model("acme/Torch")
    for bad in ("", " ", "a\0b"):
        with pytest.raises(InvalidRequest):
            resolve_model(bad)


def test_installed_models_are_listed(filled: Path) -> None:
    found = [file for file in installed_models() if file.source == "cache"]
    assert [file.name for file in found] == [
        "acme/Big:BF16",
        "acme/Chat-8B-GGUF:Q4_K_M",
        "acme/Chat-8B-GGUF:Q8_0",
        "acme/Folder",
        "acme/Only8:Q8_0",
    ]
    assert all(isinstance(file, ModelFile) and file.size_bytes > 0 for file in found)


def test_incomplete_model_is_not_listed(filled: Path) -> None:
    (shard,) = filled.rglob("snapshots/*/BF16/*-00002-of-*")
    shard.unlink()
    assert "acme/Big:BF16" not in [file.name for file in installed_models()]
    with pytest.raises(ModelNotFound, match="2 shards, 1 missing"):
        resolve_model("acme/Big:BF16")


def test_the_newest_revision_wins(cache: Path) -> None:
    put(cache, "a/b", "m-Q4_K_M.gguf", "m-Q2_K.gguf", revision="1" * 40)
    time.sleep(0.02)
    root = cache / "models--a--b"
    (root / "blobs" / "newer").write_bytes(b"newer file")
    newer = root / "snapshots" / ("2" * 40)
    newer.mkdir()
    (newer / "m-Q4_K_M.gguf").symlink_to("../../blobs/newer")
    assert resolve_model("a/b").size_bytes == 10
    assert resolve_model("a/b:Q2_K").path.parent.name == "1" * 40


def test_missing_cache_has_no_models(cache: Path) -> None:
    assert cached_models() == []


def test_names_sent_to_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_for_server(None) is None
    assert name_for_server("tiny") == "tiny"
    assert name_for_server("user/repo:Q4_K_M") == "user/repo:Q4_K_M"
    assert name_for_server("m.gguf") == str(tmp_path / "m.gguf")
    assert name_for_server("./folder") == str(tmp_path / "folder")
    (tmp_path / "user" / "repo").mkdir(parents=True)
    assert name_for_server("user/repo") == str(tmp_path / "user" / "repo")


def test_folder_resolves_by_its_bare_name(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(filled)
    for name in ("mine", "llama3.2-1b"):
        (filled / name).mkdir()
        (filled / name / "config.json").write_text("{}")
    assert resolve_model("mine").path == Path("mine")
    assert name_for_server("mine") == str(filled / "mine")
    # catalog names take precedence
    assert name_for_server("llama3.2-1b") == "llama3.2-1b"
    (filled / "empty").mkdir()
    for name in ("empty", "x" * 5000, ""):
        assert name_for_server(name) == name


def test_cached_folder_resolves_when_complete(filled: Path) -> None:
    found = resolve_model("hf.co/acme/folder")
    assert (found.name, found.is_gguf, found.source) == ("acme/Folder", False, "cache")
    assert found.path.parent.name == "snapshots"
    index = found.path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}')
    with pytest.raises(ModelNotFound, match=r"is unfinished, 1 files are missing \(model-2"):
        resolve_model("acme/Folder")
    assert "acme/Folder" not in [file.name for file in installed_models()]
    index.write_text("[]")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        resolve_model("acme/Folder")


@pytest.mark.parametrize("name", ["a/../../etc:Q4", "../a/b:Q4", "hf.co/../x", "a/..", "..%2fa/b"])
def test_no_name_leads_out_of_the_cache(filled: Path, name: str) -> None:
    (filled.parent / "etc").mkdir()
    with pytest.raises((ModelNotFound, InvalidRequest)):
        resolve_model(name)
