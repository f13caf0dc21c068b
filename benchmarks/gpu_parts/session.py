"""The real engine over a model with random weights, driven from the benchmark's own thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch

from benchmarks.gpu_parts.answers import Answer, NumberTokenizer
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.shapes import Shape
from localgen.backends.cuda import sizing
from localgen.backends.cuda.cache import PagedCache
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.embedding import Pooler
from localgen.backends.cuda.graphs import DeviceSteps
from localgen.backends.cuda.options import Settings
from localgen.backends.cuda.pages import PAGE_TOKENS, pages_for
from localgen.backends.cuda.runner import CudaRunner, Ticket, limits
from localgen.backends.cuda.spec import ModelSpec
from localgen.backends.cuda.weights import Weights, random_weights
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.intake import Intake
from localgen.backends.engine.runner import StepResult
from localgen.backends.types import (
    Failed,
    Finished,
    Request,
    SamplingParams,
    StepEvents,
)

DTYPE = torch.bfloat16
SEED = 0
GREEDY = SamplingParams(temperature=0.0)


class Loaded:
    """Weights on the device, and what a step must read of them."""

    def __init__(self, shape: Shape, device: Device) -> None:
        self.name, self.spec = shape.name, shape.spec
        self.weights = random_weights(shape.spec, device=device.torch, dtype=DTYPE, seed=SEED)
        device.synchronize()

    @property
    def step_bytes(self) -> int:
        """Weights that a step reads: all but an embedding of which it takes a few rows."""
        embed = 0 if self.spec.tied else self.weights.embed.nbytes
        return self.weights.num_bytes - embed

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values of so many tokens."""
        return tokens * sizing.kv_bytes_per_token(self.spec, DTYPE)


class WatchedRunner(CudaRunner):
    """Counts the time in which the host waits for the device."""

    waited_s = 0.0

    def collect(self, ticket: Ticket) -> StepResult:
        if ticket.done is not None:
            begun_s = time.perf_counter()
            with contextlib.suppress(RuntimeError):  # CudaRunner says what it means
                ticket.done.synchronize()
            self.waited_s += time.perf_counter() - begun_s
        return super().collect(ticket)


def watched_runner(
    spec: ModelSpec,
    weights: Weights,
    device: Device,
    *,
    kv_tokens: int,
    graphs: bool = True,
    ahead: bool = True,
    dtype: torch.dtype = DTYPE,
) -> WatchedRunner:
    """A runner as the loader makes it, over a pool of `kv_tokens`."""
    settings, tokenizer = Settings(), NumberTokenizer(spec.vocab)
    pages = pages_for(kv_tokens)
    cache = KVCache.zeros(spec, pages, device=device.torch, dtype=dtype)
    max_len = min(spec.max_len, pages * PAGE_TOKENS)
    return WatchedRunner(
        DeviceSteps(Decoder(spec, weights, max_len), cache, graphs=graphs),
        PagedCache(pages, share=True),
        limits(
            max_seqs=settings.parallel,
            max_batch_tokens=settings.max_batch_tokens,
            max_len=max_len,
            kv_tokens=pages * PAGE_TOKENS,
            share=True,
        ),
        lambda token: tokenizer.piece(token).decode(),
        ahead=ahead,
        pooler=Pooler(),
    )


class Session:
    """A context manager: an engine to which requests are handed directly."""

    def __init__(self, runner: WatchedRunner, vocab: int) -> None:
        self.runner = runner
        self._answers: dict[str, Answer] = {}
        self._count = 0
        intake = Intake(
            limits=runner.limits,
            tokenizer=NumberTokenizer(vocab),
            template=None,
            defaults=SamplingParams(),
        )
        self.engine = Engine(
            runner,
            intake,
            itl_target_ms=Settings().itl_target_ms,
            max_queue=100_000,
            publish=self._take,
        )

    @classmethod
    def of(cls, loaded: Loaded, device: Device, *, kv_tokens: int) -> Session:
        """As a user would have it: with graphs, and looking ahead."""
        runner = watched_runner(loaded.spec, loaded.weights, device, kv_tokens=kv_tokens)
        return cls(runner, loaded.spec.vocab)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.stop()
        # leaves the loop at once, and ends the thread that prepares requests
        self.engine.run()
        self.runner.close()

    def _take(self, events: StepEvents) -> None:
        now_s = time.monotonic()
        for delta in events.deltas:
            answer = self._answers[delta.request_id]
            answer.arrivals.append((now_s, delta.num_tokens))
            answer.text.append(delta.text)
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            self._answers.pop(end.request_id).end = end

    def submit(
        self, prompt: Sequence[int], max_tokens: int, params: SamplingParams = GREEDY
    ) -> Answer:
        """Hand in a request for an answer of exactly so many tokens."""
        answer = Answer(time.monotonic())
        self._count += 1
        name = f"r{self._count}"
        self._answers[name] = answer
        asked = replace(params, ignore_eos=True, max_tokens=max_tokens)
        request = Request(
            id=name, prompt_tokens=tuple(prompt), params=asked, arrived_s=answer.sent_s
        )
        self.engine.submit(request)
        return answer

    def step(self) -> None:
        """One turn of the engine's loop; it waits for something to do."""
        self.engine.step(wait=True)

    def run(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Step until these have ended. AnswerFailed."""
        while any(answer.end is None for answer in answers):
            self.step()
        for answer in answers:
            assert answer.finished.completion_tokens
        return answers

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        params: SamplingParams = GREEDY,
    ) -> Sequence[Answer]:
        """All of them at once, and to their ends. AnswerFailed."""
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        return self.run([self.submit(p, n, params) for p, n in zip(prompts, counts, strict=True)])

    def cancel(self, answers: Sequence[Answer]) -> None:
        """End these now."""
        names = {id(answer): name for name, answer in self._answers.items()}
        for answer in answers:
            if answer.end is None:
                self.engine.cancel(names[id(answer)])
        while any(answer.end is None for answer in answers):
            self.step()
