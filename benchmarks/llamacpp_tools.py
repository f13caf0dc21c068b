"""Build and run llama.cpp's own tools, of the version bundled with llama-cpp-python.

python -m benchmarks.llamacpp_tools builds them from the source package into the user's cache
folder (several minutes) and prints their folder. Requires cmake and a C++ compiler.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import platformdirs

NAMES = ("llama-bench", "llama-batched-bench", "llama-server", "llama-completion")
# llama-batched-bench prints in a thread that it does not join: output may be lost
ATTEMPTS = 10
# the flags of llama-cpp-python's build of the library, without optional parts of the tools
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class ToolFailed(Exception):
    """A tool is missing or failed; the message names it and the reason."""


@dataclass(slots=True)
class Tools:
    """The tools in a folder. commands: the command lines run so far, for the result file."""

    folder: Path
    commands: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        missing = [name for name in NAMES if not (self.folder / name).is_file()]
        if missing:
            raise ToolFailed(f"{self.folder} has no {', '.join(missing)}")

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return a command line, and record it without folders."""
        shown = shlex.join([name, *(Path(a).name if "/" in a else a for a in arguments)])
        if shown not in self.commands:
            self.commands.append(shown)
        return [str(self.folder / name), *arguments]

    def generation(
        self,
        model: Path,
        tokens: int,
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> float:
        """Run llama-bench; return the decode speed of one sequence in tokens/s.

        environment: additional variables.
        """
        answer = self._json(
            "llama-bench", "-m", str(model), "-p", "0", "-n", str(tokens), "-t", str(threads),
            "-r", "1", "-o", "jsonl", environment=environment,
        )  # fmt: skip
        return float(answer["avg_ts"])

    def prefill(self, model: Path, tokens: int, threads: int) -> float:
        """Run llama-bench; return the speed of a prompt in tokens/s."""
        answer = self._json(
            "llama-bench", "-m", str(model), "-p", str(tokens), "-n", "0", "-t", str(threads),
            "-r", "1", "-o", "jsonl",
        )  # fmt: skip
        return float(answer["avg_ts"])

    def batched(
        self,
        model: Path,
        prompt: int,
        tokens: int,
        streams: int,
        threads: int,
        *,
        unified: bool,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Run llama-batched-bench; return its record with speed_pp, speed_tg, speed in tokens/s.

        unified: all sequences share one KV cache. environment: additional variables.
        """
        ctx = -(-(prompt + tokens) // 256) * 256 * streams
        return self._json(
            "llama-batched-bench", "-m", str(model), "-npp", str(prompt), "-ntg", str(tokens),
            "-npl", str(streams), "-c", str(ctx), "-t", str(threads), "--output-format", "jsonl",
            *(["-kvu"] if unified else []), environment=environment,
        )  # fmt: skip

    def output(
        self, name: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """Run a tool; return its standard output."""
        done = subprocess.run(
            self.command(name, *arguments),
            capture_output=True,
            env=os.environ | dict(environment),
        )
        if done.returncode:
            output = (done.stdout + done.stderr)[-500:].decode(errors="replace")
            raise ToolFailed(f"{name} ended with status {done.returncode}: {output}")
        return done.stdout

    def _json(
        self, name: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, float]:
        """Run a tool; return the last line of its output that is a JSON object."""
        for _ in range(ATTEMPTS):
            output = self.output(name, *arguments, environment=environment).decode()
            lines = [line for line in output.splitlines() if line.startswith("{")]
            if lines:
                answer: dict[str, float] = json.loads(lines[-1])
                return answer
        raise ToolFailed(f"{name} printed nothing in {ATTEMPTS} attempts")


def build() -> Path:
    """Return the folder of the tools for the installed llama-cpp-python; build them if missing."""
    wanted = version("llama-cpp-python")
    folder = platformdirs.user_cache_path("localgen", appauthor=False) / f"llama.cpp-{wanted}"
    if not all((folder / "bin" / name).exists() for name in NAMES):
        with tempfile.TemporaryDirectory() as unpacked:
            _build(_sources(wanted, Path(unpacked)), folder)
    return folder / "bin"


def _sources(wanted: str, target: Path) -> Path:
    """Download and unpack llama-cpp-python's source package; return its llama.cpp folder."""
    _run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:",
         "-d", str(target), f"llama-cpp-python=={wanted}"]
    )  # fmt: skip
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as package:
        package.extractall(target, filter="data")
    (sources,) = target.glob("*/vendor/llama.cpp")
    return sources


def _build(sources: Path, folder: Path) -> None:
    extra = shlex.split(os.environ.get("CMAKE_ARGS", ""))  # the flags the library was built with
    compiler = _compiler()
    # --fresh: the folder may have an earlier build from another temporary folder
    _run(["cmake", "--fresh", "-S", str(sources), "-B", str(folder), *FLAGS, *extra], compiler)
    jobs = str(os.cpu_count() or 1)
    _run(["cmake", "--build", str(folder), "-j", jobs, "--target", *NAMES], compiler)


def _compiler() -> dict[str, str]:
    """The variables that setup.sh compiles the library with: not every GCC can use AMX."""
    script = Path(__file__).parents[1] / "setup.sh"
    lines = subprocess.run([script, "compiler"], check=True, stdout=subprocess.PIPE, text=True)
    settings = dict(line.split("=", 1) for line in lines.stdout.splitlines())
    return {name: value for name, value in settings.items() if value}


def _run(command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    print(shlex.join(command), file=sys.stderr)
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | dict(environment))
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolFailed(f"{command[0]}: {error}") from error


if __name__ == "__main__":
    try:
        print(build())
    except ToolFailed as error:
        sys.exit(f"error: {error}")
