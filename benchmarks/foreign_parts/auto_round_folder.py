"""Quantize a model folder with AutoRound on a CPU; runs without localgen.

python auto_round_folder.py MODEL IDS.npy OUT BITS; makes OUT/auto-round-VERSION-BITSbit.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# the default of AutoRound, and of localgen for 2 and 3 bits
_STEPS = 200


def main(model: str, ids: str, out: str, bits: str) -> None:
    """ids: int64 [windows, length]. Batches have 4 windows; other settings are the library's."""
    auto_round: Any = importlib.import_module("auto_round")
    windows = torch.from_numpy(np.load(ids))
    auto: Any = AutoModelForCausalLM
    rounding = auto_round.AutoRound(
        auto.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
        scheme=f"W{bits}A16",
        group_size=128,
        iters=_STEPS,
        nsamples=len(windows),
        seqlen=windows.shape[1],
        batch_size=4,
        dataset=[
            {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
            for row in windows
        ],
        device_map="cpu",
        # minutes on a CPU
        enable_torch_compile=False,
    )
    folder = Path(out) / f"auto-round-{version('auto-round')}-{bits}bit"
    rounding.quantize_and_save(str(folder), format="auto_gptq")


if __name__ == "__main__":
    main(*sys.argv[1:])
