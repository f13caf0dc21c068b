"""How one of our modules runs in an interpreter of its own."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import localgen


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module; -P: nothing in the current folder can pose as a package."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """This environment, and localgen importable from wherever it was imported here."""
    environment = dict(os.environ)
    root = str(Path(localgen.__file__).parent.parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if root not in installed:
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([root, known]) if known else root
    return environment
