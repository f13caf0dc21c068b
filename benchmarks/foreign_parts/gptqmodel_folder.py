"""Quantize a model folder with GPTQModel on a CPU; runs without localgen.

python gptqmodel_folder.py MODEL IDS.npy OUT BITS; makes OUT/gptqmodel-VERSION-BITSbit.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# its pool of model loaders takes two, and it has one on two cores
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main(model: str, ids: str, out: str, bits: str) -> None:
    """ids: int64 [windows, length]. All settings but the bits are the library's own."""
    gptqmodel: Any = importlib.import_module("gptqmodel")
    windows = [
        {"input_ids": row, "attention_mask": [1] * len(row)} for row in np.load(ids).tolist()
    ]
    quantized = gptqmodel.GPTQModel.load(
        model, gptqmodel.QuantizeConfig(bits=int(bits), group_size=128, device="cpu")
    )
    quantized.quantize(windows, batch_size=4)
    quantized.save(str(Path(out) / f"gptqmodel-{version('gptqmodel')}-{bits}bit"))


if __name__ == "__main__":
    main(*sys.argv[1:])
