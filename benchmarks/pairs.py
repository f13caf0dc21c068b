"""A target and a draft model on a backend of this machine, with random weights or trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import random_gguf
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.loaded import watched_runner
from benchmarks.gpu_parts.shapes import llama
from benchmarks.measure import ModelLine
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import DraftModelRequest, LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import ModelRunner
from localgen.hub.resolve import BUILT_IN_PATH

# of tests, the draft model of the built-in one
_TINY_DRAFT = Path(__file__).parents[1] / "tests/data/tiny-draft.gguf"
BACKENDS = ("llamacpp", "tiny", "cuda")
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
_DRAFT = replace(_TARGET, num_layers=1, sliding_windows=(None,))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loaded models with the same vocabulary. close: gives both back. is_small: a step takes a
    millisecond or two. encode: of trained ones, text to tokens."""

    name: str
    line: ModelLine
    target: ModelRunner
    draft: ModelRunner
    vocab: int
    threads: int
    close: Callable[[], None]
    is_small: bool = False
    encode: Callable[[str], list[int]] | None = None


def load_pair(backend: str, *, quick: bool, threads: int | None) -> Pair:
    """The pair for a backend; for CUDA's a small one, computed by the kernels' twins on the CPU.

    tiny: the built-in model and its draft model in llama.cpp.
    """
    if backend == "cuda":
        return _twins(threads)
    if backend == "tiny":
        return _llamacpp("tiny", BUILT_IN_PATH, _TINY_DRAFT, threads)
    target, draft = ("quick", "quick") if quick else ("1b", "draft")
    written = {name: random_gguf.cached(random_gguf.SHAPES[name]) for name in (target, draft)}
    return _llamacpp("target", written[target], written[draft], threads)


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
        vocab=_TARGET.vocab_size,
        threads=torch.get_num_threads(),
        close=close,
        is_small=True,
    )


def _llamacpp(name: str, target_path: Path, draft_path: Path, threads: int | None) -> Pair:
    is_trained = target_path == BUILT_IN_PATH
    weights = "" if is_trained else ", random"
    options = LoadOptions(ctx=None if is_trained else CTX, kv_tokens=KV_TOKENS, threads=threads)
    asked = ModelLoadRequest(
        name, str(target_path), options, draft=DraftModelRequest("draft", str(draft_path))
    )
    model = load_llamacpp_model(asked, lambda _: None)
    assert model.draft is not None
    target, drafting, info = model.runner, model.draft.runner, model.info

    def close() -> None:
        drafting.close()
        target.close()

    return Pair(
        name=info.name,
        line=ModelLine(info.description + weights, info.size_bytes, info.params),
        target=target,
        draft=drafting,
        vocab=info.vocab,
        threads=info.options.threads or 0,
        close=close,
        is_small=is_trained,
        encode=model.tokenizer.encode_for_embedding if is_trained else None,
    )
