"""Derives the built-in model at build time: the repository holds its weights once, as safetensors.

Everything else about the package is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "localgen/models/tiny"
MODEL = ROOT / "localgen/models/tiny.gguf"


def derive_model() -> None:
    """Convert the built-in model, unless it is newer than its source and the converter."""
    converter = [ROOT / "localgen/quant/gguf", ROOT / "localgen/backends/formats"]
    inputs = [*SOURCE.iterdir(), *(path for folder in converter for path in folder.rglob("*.py"))]
    newest = max(path.stat().st_mtime for path in inputs)
    if MODEL.exists() and MODEL.stat().st_mtime >= newest:
        return
    sys.path.insert(0, str(ROOT))
    from localgen.quant.gguf.convert import convert_to_gguf

    convert_to_gguf(SOURCE, MODEL, "F16")


class BuildWithModel(build_py):
    def run(self) -> None:
        derive_model()
        super().run()


setup(cmdclass={"build_py": BuildWithModel})
