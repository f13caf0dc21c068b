"""Models with random weights, and localgen's engine and runner for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from benchmarks.answers import NumberTokenizer
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.shapes import Shape
from benchmarks.session import Session
from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import DecoderWeights, random_weights
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.cuda.steps.step_sampler import CudaStepTicket
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import StepResult

DTYPE = torch.bfloat16
SEED = 0
# of the memory that is free, for the KV cache; CUDA graphs and fragmentation take the rest
_KV_SHARE = 0.9


class Loaded:
    """Weights on the device, and the bytes that a step reads. weights: random ones if None."""

    def __init__(self, shape: Shape, device: Device, weights: DecoderWeights | None = None) -> None:
        self.name, self.spec = shape.name, shape.spec
        self.cache_dtype = cache_dtype(shape)
        self.weights = weights or random_weights(
            shape.spec, device=device.torch, dtype=DTYPE, seed=SEED
        )
        device.synchronize()

    @property
    def step_bytes(self) -> int:
        """Bytes of all weights except an untied embedding."""
        embed = 0 if self.spec.tied_embeddings else self.weights.embed.nbytes
        return self.weights.num_bytes - embed

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a step of `rows` tokens reads: step_bytes without unused experts.

        Each token uses top_k experts. They are taken as drawn at random, all equally likely.
        """
        moe = self.spec.moe
        if moe is None:
            return self.step_bytes
        layers = [layer.experts for layer in self.weights.layers if layer.experts]
        expert_bytes = sum(layer.gate_up.nbytes + layer.down.nbytes for layer in layers)
        return self.step_bytes - expert_bytes * (1 - moe.top_k / moe.num_experts) ** rows

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of the keys and values of `tokens` tokens."""
        return tokens * sizing.kv_bytes_per_token(self.spec, self.cache_dtype)

    def max_kv_tokens(self, device: Device) -> int | None:
        """Largest KV cache, in tokens, in the free device memory; None if that is not known."""
        free_bytes = device.free_bytes()
        if free_bytes is None:
            return None
        work_bytes = sizing.step_work_bytes(self.spec, CudaOptions(), DTYPE)
        spare_bytes = _KV_SHARE * (free_bytes - work_bytes)
        return max(0, int(spare_bytes / self.kv_bytes(1)))


def cache_dtype(shape: Shape) -> torch.dtype:
    """Data type of the KV cache."""
    return torch.int8 if shape.int8_cache else DTYPE


class WatchedRunner(CudaRunner):
    """A CudaRunner that measures how long the host waits for the device."""

    waited_s = 0.0

    def collect(self, ticket: CudaStepTicket) -> StepResult:
        if ticket.done_event is not None:
            begun_s = time.perf_counter()
            with contextlib.suppress(RuntimeError):  # CudaRunner.collect reports it
                ticket.done_event.synchronize()
            self.waited_s += time.perf_counter() - begun_s
        return super().collect(ticket)


def watched_runner(
    spec: ModelSpec,
    weights: DecoderWeights,
    device: Device,
    *,
    kv_tokens: int,
    graphs: bool = True,
    ahead: bool = True,
    dependent: bool = False,
    dtype: torch.dtype = DTYPE,
    store: PrefixStore | None = None,
) -> WatchedRunner:
    """Create a runner as the loader does, with a KV cache of `kv_tokens`.

    dependent: see modes.Mode. dtype: of the KV cache. store: of what the KV cache evicts.
    """
    settings, tokenizer = CudaOptions(), NumberTokenizer(spec.vocab_size)
    pages = pages_for(kv_tokens)
    cache = KVCache.zeros(spec, pages, device=device.torch, dtype=dtype)
    max_len = min(spec.max_len, pages * PAGE_TOKENS)
    decoder = Decoder(spec, weights, max_len, dependent_launch=dependent)
    return WatchedRunner(
        DeviceExecutor(decoder, cache, use_cuda_graphs=graphs),
        PagedCache(pages, prefix_cache=True, store=store, memory=cache),
        cuda_limits(
            max_seqs=settings.parallel,
            max_batch_tokens=settings.max_batch_tokens,
            max_len=max_len,
            kv_tokens=pages * PAGE_TOKENS,
            prefix_cache=True,
        ),
        lambda token: tokenizer.piece(token).decode(),
        run_ahead=ahead,
        pooler=Pooler(),
    )


def engine_session(
    runner: CudaRunner,
    vocab: int,
    drafters: Sequence[Drafter] = (),
    store: PrefixStore | None = None,
) -> Session:
    """Create an engine with the loader's defaults. store: that of the runner."""
    return Session(
        runner,
        vocab,
        itl_target_ms=CudaOptions().itl_target_ms,
        drafters=drafters,
        prefix_store=store,
    )
