"""Contents of the wheel: the package once, the derived model, nothing else."""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path, PurePosixPath

import gguf
import pytest

import localgen

ROOT = Path(__file__).parents[1]
BUILT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.gguf", "__pycache__")


def build(source: Path, out: Path) -> None:
    """Build the wheel of `source` into `out`, without network or isolation."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as in a clone: nothing derived, links kept."""
    target = tmp_path_factory.mktemp("source") / "localgen"
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=BUILT))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Iterator[zipfile.ZipFile]:
    out = source.parent / "wheel"
    build(source, out)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_once_under_the_package(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert len(names) == len(set(names))
    expected = {
        str(PurePosixPath(top) / path.relative_to(folder.resolve()).as_posix())
        for top in ("localgen", "localgen/backends", "localgen/quant", "localgen/tui")
        for folder in [ROOT / top]
        for path in folder.resolve().rglob("*.py")
    }
    assert "localgen/backends/engine/wire.py" in expected
    assert {name for name in names if name.endswith(".py")} == expected


def test_nothing_generic_lands_in_site_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert len(tops) == 2
    assert "localgen" in tops
    assert any(top.endswith(".dist-info") for top in tops)


def test_holds_the_derived_model_and_not_its_source(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    others = [
        name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith(".py")
    ]
    assert sorted(others) == [
        "localgen/hub/catalog.toml",
        "localgen/models/tiny.gguf",
        "localgen/py.typed",
        "localgen/quant/texts/README.md",
        "localgen/quant/texts/calibration.txt",
        "localgen/quant/texts/heldout-chat.txt",
        "localgen/quant/texts/heldout-code.txt",
        "localgen/quant/texts/heldout-prose.txt",
    ]
    path = wheel.extract("localgen/models/tiny.gguf", tmp_path)
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == 56
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == 5_770_496


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    folder = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["Name"] == "localgen"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "cuda",
        "quant",
        "smollm2",
        "cluster",
        "mcp",
        "test",
        "dev",
    }
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in required if line.split()[0] in {"torch", "tokenizers", "triton"}]
    assert b"Apache License" in wheel.read(f"{folder}/licenses/LICENSE")
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(f"{folder}/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == {"localgen": "localgen.__main__:main"}


def test_the_model_is_derived_again_only_when_older(source: Path, wheel: zipfile.ZipFile) -> None:
    model = source / "localgen/models/tiny.gguf"
    first = model.stat().st_mtime_ns
    build(source, source.parent / "again")
    assert model.stat().st_mtime_ns == first
    later = time.time() + 1
    os.utime(source / "quant/gguf/convert.py", (later, later))
    build(source, source.parent / "newer")
    assert model.stat().st_mtime_ns > first


def test_sbom_lists_what_the_wheel_brings(wheel: zipfile.ZipFile) -> None:
    path = Path(str(wheel.filename))
    subprocess.run(
        [sys.executable, str(ROOT / "requirements/sbom.py"), str(path)], check=True, timeout=60
    )
    sbom = json.loads(path.with_name(f"localgen-{localgen.__version__}.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    root = sbom["metadata"]["component"]
    assert root["hashes"][0]["content"] == hashlib.sha256(path.read_bytes()).hexdigest()
    components = {one["name"]: one for one in sbom["components"]}
    model = hashlib.sha256(wheel.read("localgen/models/tiny.gguf")).hexdigest()
    assert components["tiny"]["hashes"][0]["content"] == model
    for name in ("llama_cpp_python", "diskcache", "httpx", "anyio"):
        version = importlib.metadata.version(name)
        assert components[name]["version"] == version
        assert components[name]["purl"].endswith(f"@{version}")
    assert not components.keys() & {"torch", "pytest", "tokenizers"}
    references = {one["bom-ref"] for one in [root, *sbom["components"]]}
    edges = {one["ref"]: one["dependsOn"] for one in sbom["dependencies"]}
    assert references == edges.keys() | {"localgen/models/tiny.gguf"}
    assert {needed for all_needed in edges.values() for needed in all_needed} < references
    assert f"pkg:pypi/httpx@{importlib.metadata.version('httpx')}" in edges[root["bom-ref"]]
