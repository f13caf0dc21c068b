"""Perplexity and KL divergence of a GGUF file, from llama.cpp's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from llama_cpp import Llama

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.quant.evaluate import EvalMetrics, FinalStates, LossAccumulator, window_logits


def gguf_metrics(
    path: Path,
    reference: FinalStates,
    device: torch.device | str = "cpu",
    on_window: Callable[[int], None] = lambda done: None,
) -> EvalMetrics:
    """Metrics on the windows of the original. on_window: called with the number of windows done.

    Raises LoadFailed if llama.cpp cannot load the file, InvalidRequest if its vocabulary size
    differs.
    """
    count, length = reference.ids.shape
    model = _load(path, length)
    try:
        if model.n_vocab() != reference.source.spec.vocab_size:
            raise InvalidRequest(
                f"{path.name} has {model.n_vocab():,} tokens, {reference.source.folder.name} "
                f"{reference.source.spec.vocab_size:,}: they cannot be compared",
                param="model",
            )
        own, paired = (LossAccumulator(count * (length - 1)) for _ in range(2))
        for index in range(count):
            ids = reference.ids[index]
            block = slice(index * (length - 1), (index + 1) * (length - 1))
            found = _logits(model, ids.tolist())[:-1]
            wanted = window_logits(reference, index, device)[:-1]
            own.add(block, 0, found, ids[1:])
            paired.add(block, 0, found, ids[1:], wanted)
            on_window(index + 1)
    finally:
        model.close()
    return EvalMetrics(own.window_nll(count), paired.window_kl(own, count))


def gguf_weights_and_bytes(path: Path) -> tuple[int, int]:
    """Number of weights and their size. Raises LoadFailed if the file is not GGUF."""
    tensors = GgufReader(path).tensors
    return (
        sum(tensor.num_elements for tensor in tensors),
        sum(tensor.data.nbytes for tensor in tensors),
    )


def _load(path: Path, length: int) -> Llama:
    try:
        return Llama(
            str(path), n_ctx=length, n_batch=length, n_gpu_layers=0, logits_all=True, verbose=False
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise LoadFailed(f"llama.cpp cannot load {path}: {error}") from None


def _logits(model: Llama, ids: list[int]) -> torch.Tensor:
    """float32 [length, vocab]."""
    model.reset()  # type: ignore[no-untyped-call]
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)], np.float32))
