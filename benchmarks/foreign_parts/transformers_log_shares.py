"""Log probabilities of a model folder by transformers; runs without localgen.

python transformers_log_shares.py FOLDER IDS.npy OUT.npy; prints the versions of the libraries.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import transformers

_LIBRARIES = ("transformers", "gptqmodel", "compressed-tensors", "optimum", "torch")


def main(folder: str, ids: str, out: str) -> None:
    """ids: int64 [windows, length]. out: float32 [windows, length, vocab]."""
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.load(ids))).logits
    np.save(out, logits.float().log_softmax(-1).numpy())
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
