"""Log probabilities of a model folder by vLLM; runs without localgen.

python vllm_log_shares.py FOLDER IDS.npy OUT.npy; prints the versions of the libraries.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np


def main(folder: str, ids: str, out: str) -> None:
    """ids: int64 [windows, length]. out: float32 [windows, length, vocab]; the last row of
    a window, which no token of the prompt follows, is NaN."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm: Any = importlib.import_module("vllm")
    windows = np.load(ids)
    model = vllm.LLM(
        folder,
        dtype="float16",
        skip_tokenizer_init=True,
        max_model_len=windows.shape[1] + 8,
        max_num_seqs=1,
        max_logprobs=-1,
        enforce_eager=True,
    )
    every = vllm.SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    answers = model.generate([{"prompt_token_ids": row.tolist()} for row in windows], every)
    np.save(out, np.stack([_rows(answer.prompt_logprobs) for answer in answers]))
    (package,) = packages_distributions()["vllm"]
    print(json.dumps({package: version(package), "torch": version("torch")}))


def _rows(positions: list[dict[int, Any] | None]) -> np.ndarray:
    """float32 [length, vocab]: row i predicts token i + 1, as logits of transformers."""
    vocab = max(len(position) for position in positions if position)
    table = np.full((len(positions), vocab), np.nan, np.float32)
    for index, position in enumerate(positions):
        for token, share in (position or {}).items():
            if token < vocab:
                table[index - 1, token] = share.logprob
    return table


if __name__ == "__main__":
    main(*sys.argv[1:])
