"""Run one of our modules in a separate interpreter."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

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
