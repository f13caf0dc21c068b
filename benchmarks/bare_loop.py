"""Minimal Python decode loop over llama.cpp: one greedy sequence, one llama_decode per token.

python -m benchmarks.bare_loop MODEL TOKENS THREADS prints the tokens/s.
"""

from __future__ import annotations

import ctypes
import sys
import time

import llama_cpp.llama_cpp as C
import numpy as np

CTX = 512


def tokens_per_second(path: str, num_tokens: int, threads: int) -> float:
    """Return the tokens/s of `num_tokens` decode steps after a prompt of one token.

    Raises OSError if the model cannot be loaded or a step fails.
    """
    silent = C.llama_log_callback(lambda *_: None)
    C.llama_log_set(silent, ctypes.c_void_p(0))
    C.llama_backend_init()
    model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
    if not model:
        raise OSError(f"cannot load {path}")
    params = C.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = CTX, threads, threads
    context = C.llama_init_from_model(model, params)
    vocab = C.llama_model_get_vocab(model)
    shape = (C.llama_vocab_n_tokens(vocab),)
    token = (ctypes.c_int32 * 1)(C.llama_vocab_bos(vocab))

    def step() -> None:
        if C.llama_decode(context, C.llama_batch_get_one(token, 1)):
            raise OSError("llama_decode failed")
        logits = np.ctypeslib.as_array(C.llama_get_logits(context), shape)
        token[0] = int(logits.argmax())

    step()
    started_s = time.perf_counter()
    for _ in range(num_tokens):
        step()
    return num_tokens / (time.perf_counter() - started_s)


if __name__ == "__main__":
    print(tokens_per_second(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
