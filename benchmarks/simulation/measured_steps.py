"""Steps of a replica's engine: what they compute, and how long they take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulation.prefix_cache import SlotCache
from benchmarks.simulation.request import Segment
from benchmarks.streams import decode_rate
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.bench.measured_request import MeasuredRequest, Prompt, Target
from localgen.bench.prompts import WordPrompts
from localgen.client import LocalClient
from localgen.config import ServerSettings

SYSTEM_TOKENS, QUESTION_TOKENS = 1500, 80
# the long ones fill the cache, whose tokens cost time in all steps that follow
_PROMPT_TOKENS = (1500, 120, 1500, 400, 1500, 800, 1500, 1500)
# questions behind each of two of them: most requests of the load are such hits
_HITS = 3
_BATCHES = (1, 2, 4)
# answers that are decoded together: to short prompts and to hits, which decode more slowly
_SHORT_TOKENS, _SHORT_ANSWER_TOKENS, _LONG_ANSWER_TOKENS = 40, 512, 64
ANSWER_TOKENS = 32
# an engine is idle for about as long between two requests of the load, and slower after it
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in a row.

    prompts: that end in them. attended: pairs of a computed prompt token and one before it.
    sequences, context: that decode, and tokens of all of them, summed over the steps. others: of
    these tokens, those of all sequences but one. cells: pairs of a computed token and a cell that
    attention passes over.
    """

    took_s: float
    steps: float
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    attended: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    others: float = 0.0
    cells: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """All but the time, in the order of FACTORS."""
        counts = (self.steps, self.prompts, self.prompt_tokens, self.attended)
        return (*counts, self.sequences, self.context, self.others, self.cells)


# of EngineCosts
FACTORS = (
    *("step_s", "first_token_s", "prompt_token_s", "attention_s", "sequence_s"),
    *("context_token_s", "batch_context_token_s", "cell_s"),
)


def ask(target: Target, prompt: Prompt, tokens: int) -> MeasuredRequest:
    """Raises RuntimeError if there is no answer."""
    request = target.ask(prompt, tokens)
    if request.error:
        raise RuntimeError(request.error)
    return request


def prompt_s(request: MeasuredRequest) -> float:
    """From admission to the first token, as the engine measured it."""
    assert request.timings is not None
    return request.timings.prompt_ms / 1e3


def answer_s(request: MeasuredRequest) -> float:
    """From the first token to the last, as the engine measured it."""
    assert request.timings is not None
    return request.timings.predicted_ms / 1e3


def is_hit(request: MeasuredRequest) -> bool:
    """Whether a long prefix was cached, not only the few tokens that all prompts share."""
    return request.cached_tokens > QUESTION_TOKENS


class KnownCells:
    """KV cache cells in use at a replica without other clients, tracked from an empty cache."""

    def __init__(self, capacity: int) -> None:
        self._cache = SlotCache(capacity)
        self._keys = itertools.count()
        self._prompts: dict[str, Segment] = {}  # by their texts

    def prompt_and_answer(
        self, request: MeasuredRequest, text: str, batch: int
    ) -> tuple[Steps, Steps]:
        """The steps of a prompt that was computed alone, and those of its answer. batch: most
        tokens of a step."""
        segments = self._admit(request, text, request.completion_tokens)
        computed = request.prompt_tokens - request.cached_tokens
        cells = steps = done = 0
        while done < computed:
            tokens = min(batch, computed - done)
            done += tokens
            steps += 1
            uncomputed = {segments[-2].key: computed - done, segments[-1].key: segments[-1].tokens}
            cells += tokens * self._cache.scanned_cells(uncomputed)
        attended = (request.cached_tokens + computed / 2) * computed
        prompt = Steps(prompt_s(request), steps, 1, computed, attended, cells=cells)
        decoded = request.completion_tokens - 1
        answer = Steps(
            took_s=answer_s(request),
            steps=decoded,
            sequences=decoded,
            context=decoded * (request.prompt_tokens + request.completion_tokens / 2),
            cells=decoded * self._cache.scanned_cells({}),
        )
        self._cache.release(segments)
        return prompt, answer

    def answers(self, streams: Sequence[MeasuredRequest], texts: Sequence[str]) -> Steps:
        """One step of the decoding of streams that began together, when half of it is done."""
        admitted = [
            self._admit(each, text, each.completion_tokens // 2)
            for each, text in zip(streams, texts, strict=True)
        ]
        scanned, count = self._cache.scanned_cells({}), len(streams)
        for segments in admitted:
            self._cache.release(segments)
        context = sum(each.prompt_tokens + each.completion_tokens / 2 for each in streams)
        return Steps(
            took_s=count / decode_rate(streams),
            steps=1,
            sequences=count,
            context=context,
            others=context * (count - 1) / count,
            cells=count * scanned,
        )

    def _admit(self, request: MeasuredRequest, text: str, answered: int) -> tuple[Segment, ...]:
        """Segments of a request: its cached prefix, if any, the computed prompt, and the answer.

        answered: tokens of the answer.
        """
        begins = [each for start, each in self._prompts.items() if text.startswith(start)]
        cached = begins[-1:] if is_hit(request) else []
        assert cached or not is_hit(request), "a hit on nothing"
        new = Segment(next(self._keys), request.prompt_tokens - request.cached_tokens)
        segments = (*cached, new, Segment(next(self._keys), answered))
        assert self._cache.admit(segments), "more than the cache holds"
        if not cached:
            self._prompts[text] = new
        return segments


class MeasuredReplica:
    """A replica whose caches are empty, without drafts and without tiers that keep anything.

    folder: runtime folder of its server. model: by name or path. info: of the loaded model.
    """

    def __init__(self, folder: Path, model: str, threads: int) -> None:
        self._model = model
        self._settings = ServerSettings(runtime_dir=folder, state_dir=folder)
        # only the socket takes sizes of tiers, and a replica that others may fetch from has one
        self._options = LoadOptions(
            draft="none", kv_ram=1, kv_disk=0, threads=threads, threads_batch=threads
        )
        self.info = self.empty()

    def empty(self) -> ModelInfo:
        """Load the model again."""
        with LocalClient(self._settings) as client:
            client.unload(self._model)
            return client.load(self._model, self._options, keep_alive="-1")


class MeasuredSteps:
    """Steps of a model that a single replica has: they are measured through the gateway, as client,
    gateway and server of a request slow its engine.

    report_s: seconds between two reports of a replica to the gateway. request_s: seconds in client,
    gateway and server, of each measured hit.
    """

    def __init__(self, gateway: Target, replica: MeasuredReplica, report_s: float) -> None:
        self._gateway, self._replica, self._report_s = gateway, replica, report_s
        self._cells = KnownCells(1)
        self.request_s: list[float] = []

    def measure(self, words: WordPrompts) -> list[Steps]:
        """Answers and prompts in an empty cache, which they fill."""
        self._empty()
        steps = []
        for count in _BATCHES:
            prompts = [words.make(_SHORT_TOKENS) for _ in range(count)]
            steps.append(self._answers(prompts, _SHORT_ANSWER_TOKENS))
        self._empty()
        texts = [words.make(tokens) for tokens in _PROMPT_TOKENS]
        for text in texts:
            steps += self._request(text)
        for text in _continued(_HITS * texts[-2:], words):
            steps += self._request(text)
        for count in 2 * _BATCHES[1:]:
            steps.append(self._answers(_continued(texts[-count:], words), _LONG_ANSWER_TOKENS))
        return steps

    def _empty(self) -> None:
        self._cells = KnownCells(self._replica.empty().kv_tokens)
        time.sleep(2 * self._report_s)  # until the gateway knows which replica has the model

    def _request(self, text: str) -> tuple[Steps, Steps]:
        time.sleep(_PAUSE_S)
        request = ask(self._gateway, text, ANSWER_TOKENS)
        if is_hit(request):
            self.request_s.append(request.first_s - request.sent_s - prompt_s(request))
        batch_tokens = self._replica.info.options.max_batch_tokens
        assert batch_tokens is not None
        return self._cells.prompt_and_answer(request, text, batch_tokens)

    def _answers(self, prompts: Sequence[str], tokens: int) -> Steps:
        """One step of their decoding together."""
        time.sleep(_PAUSE_S)
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = list(pool.map(lambda text: ask(self._gateway, text, tokens), prompts))
        return self._cells.answers(streams, prompts)


def _continued(texts: Sequence[str], words: WordPrompts) -> list[str]:
    return [f"{text} {words.make(QUESTION_TOKENS)}" for text in texts]
