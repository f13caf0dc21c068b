"""Steps of a replica's engine: what they compute, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.streams import decode_rate
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.bench.measured_request import MeasuredRequest, Prompt, Target
from localgen.bench.prompts import WordPrompts
from localgen.client import LocalClient
from localgen.config import ServerSettings

SYSTEM_TOKENS, QUESTION_TOKENS = 1500, 80
# the long ones fill the cache, whose tokens cost time in all steps that follow
_PROMPT_TOKENS = (1500, 120, 1500, 400, 1500, 800, 1500, 1500)
_BATCHES = (1, 2, 4)
_SHORT_TOKENS, _DECODE_TOKENS = 40, 512
_SETTLE_S = 0.05  # until an idle engine has told its server what its cache holds


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in a row.

    attended: pairs of a computed prompt token and one before it. sequences, context: that decode,
    and tokens of all of them, summed over the steps. cells: pairs of a computed token and a token
    in the KV cache.
    """

    took_s: float
    steps: float
    prompt_tokens: float = 0.0
    attended: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    cells: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """All but the time."""
        counts = (self.steps, self.prompt_tokens, self.attended)
        return (*counts, self.sequences, self.context, self.cells)


def prompt_steps(took_s: float, cached: int, computed: int, cells: int, batch: int) -> Steps:
    """A prompt alone. cells: in use before it. batch: most tokens of a step."""
    pairs = steps = done = 0
    while done < computed:
        tokens = min(batch, computed - done)
        done += tokens
        steps += 1
        pairs += tokens * (cells + done)
    return Steps(took_s, steps, computed, (cached + computed / 2) * computed, cells=pairs)


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


class MeasuredReplica:
    """A replica whose caches are empty, without drafts and without tiers that keep anything.

    folder: runtime folder of its server. info: of its model.
    """

    def __init__(self, target: Target, folder: Path, model: str, threads: int) -> None:
        self._target, self._model = target, model
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

    def measure(self, words: WordPrompts) -> list[Steps]:
        """Answers and prompts in an empty cache, which they fill."""
        self.empty()
        steps = [self._answers([words.make(_SHORT_TOKENS) for _ in range(n)]) for n in _BATCHES]
        self.empty()
        texts = [words.make(tokens) for tokens in _PROMPT_TOKENS]
        steps += [self._prompt(text) for text in texts]
        steps += [self._prompt(text) for text in _continued(texts[-2:], words)]
        return [*steps, self._answers(_continued(texts[-2:], words))]

    def _cells(self) -> int:
        """Tokens in the KV cache of an idle engine."""
        time.sleep(_SETTLE_S)
        with LocalClient(self._settings) as client:
            (model,) = client.stats()["models"]
        return int(model["stats"]["kv_used"] + model["stats"]["kv_cached"])

    def _prompt(self, text: str) -> Steps:
        cells, request = self._cells(), ask(self._target, text, 2)
        computed = request.prompt_tokens - request.cached_tokens
        assert self.info.options.max_batch_tokens is not None
        batch = self.info.options.max_batch_tokens
        return prompt_steps(prompt_s(request), request.cached_tokens, computed, cells, batch)

    def _answers(self, prompts: Sequence[str]) -> Steps:
        """One step of their decoding together."""
        cells, count = self._cells(), len(prompts)
        with ThreadPoolExecutor(count) as pool:
            streams = list(pool.map(lambda text: ask(self._target, text, _DECODE_TOKENS), prompts))
        answered = count * _DECODE_TOKENS / 2
        cells += sum(each.prompt_tokens - each.cached_tokens for each in streams)
        context = answered + sum(each.prompt_tokens for each in streams)
        return Steps(
            took_s=count / decode_rate(streams),
            steps=1,
            sequences=count,
            context=context,
            cells=count * (cells + answered),
        )


def _continued(texts: Sequence[str], words: WordPrompts) -> list[str]:
    return [f"{text} {words.make(QUESTION_TOKENS)}" for text in texts]
