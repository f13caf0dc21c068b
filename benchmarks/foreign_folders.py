"""Quantize the built-in model with another library, on the calibration text of benchmarks.quality.

python -m benchmarks.foreign_folders --python ENV/bin/python --library gptqmodel|auto-round
                                     --out DIR [--bits 4,3,2] [--samples 24]

ENV has the library. `benchmarks.quality --samples 24 --folder DIR/…` measures the folders beside
localgen's recipes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.evaluated_model import MODEL, TextSizes, opened_model
from localgen.config import BUILT_IN_MODEL

PARTS = Path(__file__).parent / "foreign_parts"
LIBRARIES = ("gptqmodel", "auto-round")


def main(arguments: list[str] | None = None) -> int:
    """Make the folders. Returns 1 if the library fails for any of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign_folders")
    parser.add_argument("--python", required=True, help="interpreter of the environment")
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--bits", default="4,3,2", help="separated by commas")
    parser.add_argument("--samples", type=int, default=24, help="windows of the calibration text")
    options = parser.parse_args(arguments)
    # not resolved: a link in an environment tells the interpreter where its packages are
    python = Path(options.python).absolute()
    script = PARTS / f"{options.library.replace('-', '_')}_folder.py"
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as work:
        ids = Path(work) / "ids.npy"
        with opened_model(BUILT_IN_MODEL, TextSizes(options.samples, 1)) as model:
            np.save(ids, model.calibration.numpy())
        for bits in options.bits.split(","):
            parts = (python, script, MODEL, ids, options.out.absolute(), bits)
            # GPTQModel writes logs into its working folder
            run = subprocess.run(list(map(str, parts)), cwd=work, check=False)
            failed |= run.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
