"""Steps of a replica's engine: what they compute, and how long they take."""

from __future__ import annotations

import itertools
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
_SHORT_TOKENS, _DECODE_TOKENS = 40, 512


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in a row.

    prompts: that end in them. attended: pairs of a computed prompt token and one before it.
    sequences, context: that decode, and tokens of all of them, summed over the steps. cells: pairs
    of a computed token and a cell that attention passes over.
    """

    took_s: float
    steps: float
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    attended: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    cells: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """All but the time."""
        counts = (self.steps, self.prompts, self.prompt_tokens, self.attended)
        return (*counts, self.sequences, self.context, self.cells)


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


class KnownCells:
    """KV cache cells in use at a replica without other clients, tracked from an empty cache."""

    def __init__(self, capacity: int) -> None:
        self._cache = SlotCache(capacity)
        self._keys = itertools.count()
        self._prompts: dict[str, Segment] = {}  # by their texts

    def prompt(self, request: MeasuredRequest, text: str, batch: int) -> Steps:
        """The steps of a prompt that was computed alone. batch: most tokens of a step."""
        segments = self._admit(request, text)
        computed = request.prompt_tokens - request.cached_tokens
        cells = steps = done = 0
        while done < computed:
            tokens = min(batch, computed - done)
            done += tokens
            steps += 1
            uncomputed = {segments[-2].key: computed - done, segments[-1].key: segments[-1].tokens}
            cells += tokens * self._cache.scanned_cells(uncomputed)
        self._cache.release(segments)
        attended = (request.cached_tokens + computed / 2) * computed
        return Steps(prompt_s(request), steps, 1, computed, attended, cells=cells)

    def answers(self, streams: Sequence[MeasuredRequest], texts: Sequence[str]) -> Steps:
        """One step of the decoding of streams that began together, when half of it is done."""
        admitted = [self._admit(each, text) for each, text in zip(streams, texts, strict=True)]
        uncomputed = {answer.key: answer.tokens // 2 for *_, answer in admitted}
        scanned, count = self._cache.scanned_cells(uncomputed), len(streams)
        for segments in admitted:
            self._cache.release(segments)
        context = sum(each.prompt_tokens + each.completion_tokens / 2 for each in streams)
        return Steps(
            took_s=count / decode_rate(streams),
            steps=1,
            sequences=count,
            context=context,
            cells=count * scanned,
        )

    def _admit(self, request: MeasuredRequest, text: str) -> tuple[Segment, ...]:
        """Segments of a request: its cached prefix, if any, the computed prompt, and the answer."""
        begins = [each for start, each in self._prompts.items() if text.startswith(start)]
        cached = begins[-1:] if request.cached_tokens > SYSTEM_TOKENS / 2 else []
        new = Segment(next(self._keys), request.prompt_tokens - request.cached_tokens)
        segments = (*cached, new, Segment(next(self._keys), request.completion_tokens))
        assert self._cache.admit(segments), "more than the cache holds"
        if not cached:
            self._prompts[text] = new
        return segments


class MeasuredReplica:
    """A replica whose caches are empty, without drafts and without tiers that keep anything.

    folder: runtime folder of its server. info: of its model.
    """

    def __init__(self, target: Target, folder: Path, model: str, threads: int) -> None:
        self._target, self._model = target, model
        self._cells = KnownCells(1)
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
            info = client.load(self._model, self._options, keep_alive="-1")
        self._cells = KnownCells(info.kv_tokens)
        return info

    def measure(self, words: WordPrompts) -> list[Steps]:
        """Answers and prompts in an empty cache, which they fill."""
        self.empty()
        steps = [self._answers([words.make(_SHORT_TOKENS) for _ in range(n)]) for n in _BATCHES]
        self.empty()
        texts = [words.make(tokens) for tokens in _PROMPT_TOKENS]
        steps += [self._prompt(text) for text in texts]
        steps += [self._prompt(text) for text in _continued(_HITS * texts[-2:], words)]
        return [*steps, self._answers(_continued(texts[-2:], words))]

    def _prompt(self, text: str) -> Steps:
        request = ask(self._target, text, 2)
        assert self.info.options.max_batch_tokens is not None
        return self._cells.prompt(request, text, self.info.options.max_batch_tokens)

    def _answers(self, prompts: Sequence[str]) -> Steps:
        """One step of their decoding together."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = list(pool.map(lambda text: ask(self._target, text, _DECODE_TOKENS), prompts))
        return self._cells.answers(streams, prompts)


def _continued(texts: Sequence[str], words: WordPrompts) -> list[str]:
    return [f"{text} {words.make(QUESTION_TOKENS)}" for text in texts]
