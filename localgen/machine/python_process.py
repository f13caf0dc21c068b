"""Run one of our modules in a separate interpreter, and read what it printed last."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import IO

import localgen


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module. -P: packages in the current folder are not imported."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """This process's environment, with localgen importable from where it was imported."""
    environment = dict(os.environ)
    root = str(Path(localgen.__file__).parent.parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if root not in installed:
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([root, known]) if known else root
    return environment


def last_line(output: IO[bytes], default: str) -> str:
    """The last line that is not blank in a file of a process's output."""
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), default)
