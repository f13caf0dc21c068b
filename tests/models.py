"""Runs the built-in model in an Engine on the test's own thread."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine_stats import EngineStats
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.types import (
    Failed,
    Finished,
    Message,
    PositionLogprobs,
    Request,
    StepEvents,
    ToolCallDelta,
)

TESTS = Path(__file__).parent
TINY_GGUF = TESTS.parent / "localgen" / "models" / "tiny.gguf"


def questions(count: int) -> list[tuple[Message, ...]]:
    """Chats from the model's evaluation set."""
    lines = (TESTS / "data" / "questions.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [tuple(Message(m["role"], m["content"]) for m in chat) for chat in chats[:count]]


@dataclass
class Reply:
    """Everything received for one request."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def tokens(self) -> list[int]:
        """Ids of the answer; needs logprobs."""
        return [position.chosen.token_id for position in self.logprobs]

    @property
    def whole_calls(self) -> list[tuple[str, str]]:
        """Names and arguments of the tool calls."""
        names = {piece.index: piece.name for piece in self.calls if piece.name}
        return [
            (name, "".join(piece.arguments for piece in self.calls if piece.index == index))
            for index, name in names.items()
        ]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end


def noisy(replies: Sequence[Reply], references: Sequence[Reply], noise: float) -> int:
    """Number of answers that differ.

    Asserts for each that rounding can explain it: its two best logits lie within `noise`.
    """
    count = 0
    for reply, reference in zip(replies, references, strict=True):
        if reply.tokens == reference.tokens:
            assert reply.text == reference.text
            continue
        at = _parting(reply, reference)
        best, second = reference.logprobs[at].top
        assert best.logprob - second.logprob < noise, (reply.text, reference.text)
        assert reply.tokens[at] in (best.token_id, second.token_id)
        count += 1
    return count


def moved(replies: Sequence[Reply], references: Sequence[Reply], noise: float) -> int:
    """Number of sampled answers that differ.

    Asserts for each that rounding can explain it: where they diverge, both were sampled from the
    same probabilities, within `noise`. The number itself depends on the machine; sampling with
    other random numbers would change nearly all.
    """
    count = 0
    for reply, reference in zip(replies, references, strict=True):
        if reply.tokens == reference.tokens:
            assert reply.text == reference.text
            continue
        count += 1
        at = _parting(reply, reference)
        if at < min(len(reply.tokens), len(reference.tokens)):  # none of the two ended there
            ours, theirs = (
                {t.token_id: t.logprob for t in r.logprobs[at].top} for r in (reply, reference)
            )
            for token in ours.keys() & theirs.keys():
                assert abs(ours[token] - theirs[token]) < noise, (reply.text, reference.text)
            assert ours.keys() & theirs.keys()
    return count


def _parting(one: Reply, other: Reply) -> int:
    """First position at which the tokens differ."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    both = min(len(one.tokens), len(other.tokens))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), both)


class LoadedBench:
    """A loaded model in an engine, with methods to send requests."""

    def __init__(self, model: LoadedModel, drafters: Sequence[Drafter] = ()) -> None:
        self.model = model
        self.replies: dict[str, Reply] = {}
        self.stats = EngineStats()
        self.engine = Engine(
            model.runner,
            InputProcessor(
                limits=model.runner.limits,
                tokenizer=model.tokenizer,
                template=model.template,
                defaults=model.info.sampling,
                grammar_compiler=GrammarCompiler(model.tokenizer, model.sandbox),
                read_adapter=model.read_adapter,
            ),
            itl_target_ms=1e9,
            max_queue=1000,
            publish=self._take,
            drafters=drafters,
            prefix_store=model.prefix_store,
        )
        self._count = 0

    def _take(self, events: StepEvents) -> None:
        for delta in events.deltas:
            reply = self.replies[delta.request_id]
            reply.text += delta.text
            reply.reasoning += delta.reasoning
            reply.calls += delta.tool_calls
            reply.logprobs += delta.logprobs
        ends: tuple[Finished | Failed, ...] = (*events.finished, *events.failed)
        for end in ends:
            reply = self.replies[end.request_id]
            assert reply.end is None, "a request ends once"
            reply.end = end
        self.stats = events.stats or self.stats

    def submit(self, chat: Sequence[Message], params: SamplingParams, **more: object) -> str:
        """Submit a chat; returns its request id."""
        self._count += 1
        name = f"r{self._count}"
        self.replies[name] = Reply()
        request = Request(id=name, messages=tuple(chat), params=params, arrived_s=time.monotonic())
        self.engine.submit(replace(request, **more))  # type: ignore[arg-type]
        return name

    def run(self, names: Iterable[str]) -> list[Reply]:
        """Step until these requests have ended."""
        waited = [self.replies[name] for name in names]
        deadline_s = time.monotonic() + 120
        while any(reply.end is None for reply in waited):
            assert time.monotonic() < deadline_s, "requests do not end"
            self.engine.step(wait=True)
        self.engine.step(wait=False)
        return waited

    def ask(self, chats: Sequence[Sequence[Message]], params: SamplingParams) -> list[Reply]:
        """Answers to all chats, submitted at once."""
        return self.run([self.submit(chat, params) for chat in chats])

    def ask_one_by_one(
        self, chats: Sequence[Sequence[Message]], params: SamplingParams
    ) -> list[Reply]:
        """Answers to the chats, one request at a time."""
        return [self.run([self.submit(chat, params)])[0] for chat in chats]

    def check(self) -> None:
        """Assert that the cache's counts are consistent."""

    def close(self) -> None:
        self.check()
        usage = self.model.runner.usage()
        assert usage.used == 0
        assert usage.cached + usage.free == self.model.runner.limits.kv_tokens
        self.model.runner.close()


class Bench(LoadedBench):
    """A GGUF model in llama.cpp."""

    def __init__(
        self,
        options: LoadOptions,
        path: Path = TINY_GGUF,
        drafters: Sequence[Drafter] = (),
        kv_dir: Path | None = None,
    ) -> None:
        request = ModelLoadRequest(
            "tiny", str(path), options, kv_dir=str(kv_dir) if kv_dir else None
        )
        super().__init__(load_llamacpp_model(request, lambda _share: None), drafters)
        assert isinstance(self.model.runner, LlamaRunner)
        self.runner = self.model.runner

    def check(self) -> None:
        self.runner.kv_cache.check()
