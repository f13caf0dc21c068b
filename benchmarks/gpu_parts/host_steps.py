"""Steps of the real engine and CUDA runner on a device that computes nothing."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_parts.shapes import llama
from benchmarks.session import Session
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kernels.sampling.sample import SamplerOutput, SamplingTensors
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import StepBatch
from localgen.backends.cuda.model.decoder import KVCache
from localgen.backends.cuda.model.process_group import TensorParallelGroup
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps import cuda_graphs, sampler
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.runner.interface import StepResult
from localgen.backends.sampling_params import SamplingParams

SPEC = llama(
    layers=1, hidden=64, intermediate=64, heads=1, kv_heads=1, head_dim=64, vocab=8, max_len=4096
)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)
# in which the batch is still filled, and shapes are captured
_FIRST_STEPS = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Processor times of a step in microseconds: the mean of host_us, the median of the others.

    host_us: all of it. exposed_us: from the results of a step to the launch of the next one's
    sampling, for which the device waits if the forward pass launched ahead is shorter. ahead_us: to
    the launch of the forward pass after it.
    """

    host_us: float
    exposed_us: float
    ahead_us: float


class NoOpDecoder:
    """Stands in for Decoder: computes nothing."""

    spec, max_len = SPEC, SPEC.max_len
    group = TensorParallelGroup(ModelShard(SPEC))

    def forward(self, batch: StepBatch, cache: KVCache, out: Tensor | None = None) -> Tensor:
        """Return logits of any value."""
        return torch.empty(len(batch.output_rows), SPEC.vocab_size) if out is None else out


def _no_kernel(*_: object) -> None:
    """Stands in for the launch of a kernel: does nothing."""


class _TimedRunner(CudaRunner):
    """Notes when the results of a step have come, and when the next step was launched."""

    results_s = sampling_s = replay_s = 0.0

    def collect(self, ticket: Any) -> StepResult:
        self.results_s = time.thread_time()
        return super().collect(ticket)


class HostSteps:
    """An engine over a CUDA runner whose device does nothing, as a context manager."""

    def __init__(self, *, max_seqs: int) -> None:
        options = CudaOptions()
        pages = max_seqs * pages_for(1024)
        cache = KVCache.zeros(SPEC, 1, device="cpu", dtype=torch.float32)
        self._runner = _TimedRunner(
            DeviceExecutor(
                NoOpDecoder(),  # type: ignore[arg-type]
                cache,
                use_cuda_graphs=True,
                capture=self._capture,
            ),
            PagedCache(pages, prefix_cache=True),
            cuda_limits(
                max_seqs=max_seqs,
                max_batch_tokens=options.max_batch_tokens,
                max_len=SPEC.max_len,
                kv_tokens=pages * PAGE_TOKENS,
                prefix_cache=True,
            ),
            str,
            run_ahead=True,
            pooler=Pooler(),
        )
        self._session = Session(self._runner, SPEC.vocab_size, itl_target_ms=options.itl_target_ms)
        self._patches = ExitStack()

    def __enter__(self) -> HostSteps:
        torch.set_num_threads(1)  # copies to the device are small copies in memory here
        gc.collect()
        gc.freeze()  # as the engine process does
        patches = self._patches
        patches.enter_context(mock.patch.object(sampler, "sample_tokens", self._sample))
        # another checkout may lack it
        patches.enter_context(
            mock.patch.object(cuda_graphs, "advance_decode_inputs", _no_kernel, create=True)
        )
        self._session.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.__exit__(kind, error, trace)
        self._patches.close()

    def _capture(self, forward: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            self._runner.replay_s = time.thread_time()

        return replay

    def _sample(self, logits: Tensor, settings: SamplingTensors) -> SamplerOutput:
        self._runner.sampling_s = time.thread_time()
        rows = len(logits)
        return SamplerOutput(torch.zeros(rows, dtype=torch.int64), logits, logits[:, 0])

    def measure(self, prompts: Sequence[Sequence[int]], steps: int) -> StepTimes:
        """Decode all prompts at once, and measure `steps` steps of that."""
        runner, session = self._runner, self._session
        tokens = _FIRST_STEPS + steps + len(prompts) + 100
        answers = [
            session.submit(prompt, tokens, replace(SAMPLED, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        while not all(answer.arrivals for answer in answers):
            session.step()
        while runner.prepare_while_idle():
            pass
        for _ in range(_FIRST_STEPS):
            session.step()
        times: list[tuple[float, float, float]] = []
        for _ in range(steps):
            results_s, begun_s = runner.results_s, time.thread_time()
            session.step()
            took_s = time.thread_time() - begun_s
            times.append((took_s, runner.sampling_s - results_s, runner.replay_s - results_s))
        assert all(answer.end is None for answer in answers)
        session.cancel(answers)
        host_s, exposed_s, ahead_s = zip(*times, strict=True)
        return StepTimes(
            statistics.mean(host_s) * 1e6,
            statistics.median(exposed_s) * 1e6,
            statistics.median(ahead_s) * 1e6,
        )
