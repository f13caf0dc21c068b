"""A target and a draft model with random weights, on a backend of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks import random_gguf
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.loaded import watched_runner
from benchmarks.gpu_parts.shapes import llama
from benchmarks.measure import ModelLine
from localgen.backends.cuda.weights import random_weights
from localgen.backends.engine.runner import ModelRunner
from localgen.backends.llamacpp.load import load
from localgen.backends.models import DraftModel, Load, LoadOptions

KV_TOKENS, CTX = 8192, 2048
_TARGET = llama(
    layers=4,
    hidden=256,
    intermediate=512,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocab=2048,
    max_len=CTX,
)
_DRAFT = replace(_TARGET, layers=1, windows=(None,))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loaded models with the same vocabulary. close: gives both back."""

    name: str
    line: ModelLine
    target: ModelRunner
    draft: ModelRunner
    vocab: int
    threads: int
    close: Callable[[], None]


def load_pair(backend: str, *, quick: bool, threads: int | None) -> Pair:
    """The pair for a backend; for CUDA's a small one, computed by the kernels' twins on the CPU."""
    return _twins(threads) if backend == "cuda" else _llamacpp(quick, threads)


def _twins(threads: int | None) -> Pair:
    if threads:
        torch.set_num_threads(threads)
    cpu = Device.found(gpu=False)
    weights = [
        random_weights(spec, device=cpu.torch, dtype=torch.float32, seed=0)
        for spec in (_TARGET, _DRAFT)
    ]
    runners = [
        watched_runner(spec, held, cpu, kv_tokens=KV_TOKENS, ahead=False, dtype=torch.float32)
        for spec, held in zip((_TARGET, _DRAFT), weights, strict=True)
    ]

    def close() -> None:
        for runner in runners:
            runner.close()

    return Pair(
        name="CPU twin",
        line=ModelLine("llama F32, random", weights[0].num_bytes, _TARGET.num_params),
        target=runners[0],
        draft=runners[1],
        vocab=_TARGET.vocab,
        threads=torch.get_num_threads(),
        close=close,
    )


def _llamacpp(quick: bool, threads: int | None) -> Pair:
    target_shape = random_gguf.SHAPES["quick" if quick else "1b"]
    draft_shape = random_gguf.SHAPES["quick" if quick else "draft"]
    options = LoadOptions(ctx=CTX, kv_tokens=KV_TOKENS, threads=threads)
    draft = DraftModel("draft", str(random_gguf.cached(draft_shape)))
    path = str(random_gguf.cached(target_shape))
    model = load(Load("target", path, options, draft=draft), lambda _: None)
    assert model.draft is not None
    target, drafting, info = model.runner, model.draft.runner, model.info

    def close() -> None:
        drafting.close()
        target.close()

    return Pair(
        name=info.name,
        line=ModelLine(f"{info.description}, random", info.size_bytes, info.params),
        target=target,
        draft=drafting,
        vocab=info.vocab,
        threads=info.options.threads or 0,
        close=close,
    )
