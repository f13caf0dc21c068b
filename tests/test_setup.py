"""setup.sh: what it installs is locked with hashes, and a wheel the user gives is verified."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import re
import subprocess
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKED = (
    "run",
    "test",
    "dev",
    "torch",
    "torch-cpu",
    "cuda",
    "cluster",
    "llama",
    "smollm2",
    "build",
)
# installed apart, or instead of what the others install
APART = {"torch-cpu", "cuda", "build"}
WHEEL = "llama_cpp_python-0.0.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("setup") / "venv"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package without contents that claims to be llama-cpp-python."""
    path = tmp_path / WHEEL
    info = "llama_cpp_python-0.0.1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.0.1\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def url(wheel: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(wheel.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{wheel.name}"
    server.shutdown()
    server.server_close()


def setup(venv: Path, llama_wheel: str) -> str:
    """What setup.sh says. Without an index it fails at the latest once it wants the libraries."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"VENV": str(venv), "LLAMA_WHEEL": llama_wheel, "PIP_NO_INDEX": "1"}
    environment["PIP_CONFIG_FILE"] = os.devnull
    (venv / "wheels" / WHEEL).unlink(missing_ok=True)
    done = subprocess.run(
        [str(ROOT / "setup.sh")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    return done.stderr


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# setup.sh and pip treat the hash of a path and that of a URL alike
def test_a_wheel_with_its_hash_is_installed(venv: Path, wheel: Path) -> None:
    said = setup(venv, f"{wheel}#sha256={digest(wheel)}")
    assert "not verified" not in said
    assert "requirements/run.txt" in said, said  # as far as one comes without an index
    assert digest(venv / "wheels" / WHEEL) == digest(wheel)


def test_a_wheel_with_another_hash_is_refused(venv: Path, wheel: Path, url: str) -> None:
    expected = digest(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llama_cpp/__init__.py", "print('foreign code')")
    said = setup(venv, f"{url}#sha256={expected}")
    assert "DO NOT MATCH THE HASHES" in said
    assert expected in said
    assert not (venv / "wheels" / WHEEL).exists()


def test_a_wheel_without_hash_is_said_to_be_unverified(venv: Path, wheel: Path) -> None:
    said = setup(venv, str(wheel))
    assert "This wheel is not verified: to check it, append #sha256=HASH" in said
    assert (venv / "wheels" / WHEEL).exists()


@pytest.mark.parametrize("fragment", ["sha256=", "sha256=abc", "sha256=" + "g" * 64, "md5=abc"])
def test_a_hash_that_is_none_is_refused(venv: Path, wheel: Path, fragment: str) -> None:
    said = setup(venv, f"{wheel}#{fragment}")
    assert "setup: LLAMA_WHEEL=" in said
    assert "sha256=" in said
    assert not (venv / "wheels" / WHEEL).exists()


# a Python whose pip installs anything but one build of torch
PYTHON = """#!/bin/sh
case "$*" in
*torch-cpu.txt*)
    echo "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
    echo " Got abc" >&2
    exit 1
    ;;
*) sleep 0.3 ;; # as long as pip takes at least
esac
"""


def test_why_there_is_no_cpu_build_of_torch_is_shown(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "given").touch()  # nothing to compile
    environment = os.environ | {"VENV": str(tmp_path), "LLAMA_WHEEL": ""}
    done = subprocess.run(
        [str(ROOT / "setup.sh"), "dev"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stderr.splitlines()
    at = lines.index("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    assert lines[at + 1] == " Got abc"
    assert lines[at + 2].startswith("No verified CPU build of torch for this machine: installing")


def locked(file: str) -> dict[str, Version]:
    """Name -> version of each requirement of a file. Each must have a hash."""
    found: dict[str, Version] = {}
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    for block in re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)[1:]:
        requirement = Requirement(block.split("\\")[0])
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        found[canonicalize_name(requirement.name)] = Version(specifier.version)
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    assert found
    return found


def test_everything_that_pyproject_declares_is_locked() -> None:
    versions: dict[str, Version] = {}
    for file in LOCKED:
        new = locked(file)
        assert file in APART or not new.keys() & versions.keys()
        versions = new | versions
    assert locked("torch-cpu") == {"torch": Version(f"{versions['torch']}+cpu")}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    declared = pyproject["project"]["dependencies"] + pyproject["build-system"]["requires"]
    for line in declared + [line for lines in extras.values() for line in lines]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "localgen":
            assert requirement.specifier.contains(versions[name]), line


def test_everything_that_setup_installs_is_verified() -> None:
    text = (ROOT / "setup.sh").read_text().replace("\\\n", " ")
    pip = re.compile(
        r"^ *(?:pip|\S*python\S* -m pip) .*\b(?:install|download|wheel) .*", re.MULTILINE
    )
    calls = pip.findall(text)
    # what the user gives, and what was made from it
    chosen = ('-r "$venv/llama.txt"', '"$fresh"/llama_cpp_python-*.whl', "--no-index")
    unverified = [call for call in calls if "--require-hashes" not in call]
    assert len(calls) > len(unverified) == len(chosen)
    assert all(any(part in call for part in chosen) for call in unverified), unverified


@pytest.mark.parametrize(
    ("release", "breaks_amx"), [("12.2.0", True), ("13.2.1", True), ("12.4.0", False)]
)
def test_a_gcc_that_breaks_amx_does_without(tmp_path: Path, release: str, breaks_amx: bool) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text(
        "#!/bin/sh\n"
        "case $1 in\n"
        "--version) echo 'Copyright (C) Free Software Foundation, Inc.' ;;\n"
        "-dumpmachine) echo x86_64-linux-gnu ;;\n"
        f"-dumpfullversion) echo {release} ;;\n"
        "esac\n"
    )
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "CFLAGS": "-O3"}
    done = subprocess.run(
        [ROOT / "setup.sh", "compiler"], env=environment, capture_output=True, text=True, check=True
    )
    settings = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert settings["CC"] == str(compiler)
    assert settings["CFLAGS"].startswith("-O3")
    assert ("-mno-amx-tile" in settings["CFLAGS"]) == breaks_amx
