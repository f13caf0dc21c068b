"""An engine process without a model: speaks the wire protocol, repeats the prompt word by word.

Run as `python tests/fake_engine.py FD`. The "model" is a JSON file that sets the behaviour:
load_s, first_s, token_s, say (lines of output), fail (a message) and code, options (in force),
kv_bytes, size_bytes, crash_repacked (die of an illegal instruction unless repacking is off), answer
(instead of the prompt), calls (arguments by tool: the first one offered is called, unless the last
message is its result), restored (tokens from other tiers, for each prompt), kv_tiers, save_s (until
it ends; then there is a file beside the model, named `….saved`).
The word `!die` ends the process without a message, `!spin` is a step that computes for spin_s.
Embedding takes token_s per word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from localgen.backends.engine import wire
from localgen.backends.engine_stats import EngineStats, KVTierStats, SequenceStats
from localgen.backends.messages import FrameSocket
from localgen.backends.model_info import (
    DraftInfo,
    DraftModelRequest,
    LoadOptions,
    ModelInfo,
    ModelLoadRequest,
)
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import (
    Delta,
    Embedded,
    EmbedRequest,
    Failed,
    Finished,
    PositionLogprobs,
    Request,
    RestoredTokens,
    StepEvents,
    Timings,
    Tokenized,
    TokenizeRequest,
    TokenLogprob,
    ToolCallDelta,
)

MAX_PROMPT = 1000
IDLE_BEAT_S = 0.25
WIDTH = 4


def vector_of(text: str | tuple[int, ...]) -> list[float]:
    """A vector of length 1: two of its elements are 0.6 and 0.8."""
    at = len(text) % 3
    return [0.0] * at + [0.6, -0.8] + [0.0] * (WIDTH - 2 - at)


def info_of(load: ModelLoadRequest, script: dict[str, Any]) -> ModelInfo:
    in_force = {"ctx": 2048, "parallel": 4, "mmap": True, "max_queue": 64}
    asked = {k: v for k, v in dataclasses.asdict(load.options).items() if v is not None}
    options = LoadOptions(**(in_force | script.get("options", {}) | asked))
    return ModelInfo(
        name=load.name,
        path=load.path,
        architecture="fake",
        description="echo",
        params=6,
        size_bytes=script.get("size_bytes", Path(load.path).stat().st_size),
        vocab=100,
        ctx_train=4096,
        ctx=options.ctx or 0,
        kv_tokens=4096,
        max_seqs=4,
        kv_bytes=script.get("kv_bytes", 0),
        layers=1,
        backend="fake",
        processor="100% CPU",
        load_ms=script.get("load_s", 0) * 1e3,
        can_rewind=True,
        chat_template=None,
        sampling=SamplingParams(logit_bias={7: 1.5}),
        options=options,
        notes=("a fake",),
        embedding_width=WIDTH,
        draft=draft_of(load.draft),
    )


def draft_of(draft: DraftModelRequest | None) -> DraftInfo | None:
    if draft is None:
        return None
    size = Path(draft.path).stat().st_size
    return DraftInfo(
        name=draft.name,
        path=draft.path,
        description="",
        size_bytes=size,
        ctx=2048,
        kv_bytes=0,
        work_bytes=0,
    )


def spin(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


class FakeEngine:
    def __init__(self, sock: FrameSocket) -> None:
        self.sock = sock
        self.path, self.script = "", dict[str, Any]()
        self.inbox: queue.Queue[wire.WireMessage | None] = queue.Queue()
        self.running: dict[str, tuple[Request, list[str], int]] = {}
        self.texts: dict[str, tuple[EmbedRequest, int]] = {}  # with the words that are left
        self.cancelled = 0

    def send(self, message: wire.WireMessage) -> None:
        with contextlib.suppress(OSError):  # the server is gone, as `read` notices
            self.sock.send(wire.CODEC.encode(message))

    def read(self) -> None:
        try:
            for message in map(wire.CODEC.decode, self.sock):
                self.inbox.put(message)
        finally:  # also when the server was killed with our messages unread
            if "save_s" in self.script:
                time.sleep(self.script["save_s"])
                Path(self.path + ".saved").touch()
            os._exit(0)

    def load(self) -> bool:
        load = self.inbox.get()
        assert isinstance(load, ModelLoadRequest)
        self.path, self.script = load.path, json.loads(Path(load.path).read_text())
        print("fake engine loads", load.path, flush=True)
        with open(load.path + ".loads", "a") as loads:
            loads.write(f"{os.getpid()}\n")
        for step in range(10):
            time.sleep(self.script.get("load_s", 0) / 10)
            self.send(wire.LoadProgress(step / 10))
        if self.script.get("crash_repacked") and load.options.repack is not False:
            os.kill(os.getpid(), signal.SIGILL)
        for line in self.script.get("say", ()):
            sys.stdout.buffer.write(line.encode(errors="replace") + b"\n")
        sys.stdout.flush()
        if "fail" in self.script:
            self.send(wire.LoadError(self.script.get("code", "load_failed"), self.script["fail"]))
            return False
        self.send(wire.LoadComplete(info_of(load, self.script)))
        return True

    def accept(self, message: wire.WireMessage | None) -> None:
        match message:
            case wire.Submit(request):
                self.submit(request)
            case wire.Cancel(request_id):
                self.cancel(request_id)
            case wire.AnswerNow(request_id):
                self.answer_now(request_id)
            case wire.SubmitEmbedding(texts):
                self.embed(texts)
            case TokenizeRequest(request):
                tokenized = Tokenized(request.id, request.prompt or "", (1, 2), (b"a", b"b"))
                self.send(StepEvents(tokenized=(tokenized,)))

    def cancel(self, request_id: str) -> None:
        running = self.running.pop(request_id, None)
        if running is not None:
            end = dataclasses.replace(self.finished(*running), reason="cancelled")
            self.send(StepEvents(finished=(end,)))
        if running is not None or self.texts.pop(request_id, None) is not None:
            self.cancelled += 1

    def answer_now(self, request_id: str) -> None:
        """Say `now` next, and end."""
        if request_id in self.running:
            request, words, done = self.running[request_id]
            self.running[request_id] = (request, [*words[:done], "now"], done)

    def submit(self, request: Request) -> None:
        time.sleep(self.script.get("first_s", 0))
        text = request.messages[-1].content if request.messages else request.prompt or ""
        text = str(request.params.seed) if text == "!seed" else self.script.get("answer", text)
        words = [word for word in text.split(" ") if word]
        if len(words) > MAX_PROMPT:
            reason = f"prompt is {len(words)} tokens, context is {MAX_PROMPT}"
            failed = Failed(request.id, "context_length_exceeded", reason, "messages")
            return self.send(StepEvents(failed=(failed,)))
        if len(self.running) >= self.script.get("max_queue", 64):
            failed = Failed(request.id, "queue_full", "1 request waits already")
            return self.send(StepEvents(failed=(failed,)))
        if call := self.scripted_call(request):
            delta = Delta(request.id, "", 1, tool_calls=(call,))
            end = dataclasses.replace(self.finished(request, ["call"], 1), reason="tool_calls")
            return self.send(StepEvents((delta,), (end,)))
        self.running[request.id] = (request, words, 0)

    def scripted_call(self, request: Request) -> ToolCallDelta | None:
        calls = self.script.get("calls", {})
        name = next((tool.name for tool in request.tools if tool.name in calls), None)
        if name is None or not request.messages or request.messages[-1].role == "tool":
            return None
        return ToolCallDelta(0, json.dumps(calls[name]), id=f"call_{request.id[:8]}", name=name)

    def embed(self, request: EmbedRequest) -> None:
        if any(text == "!die" for text in request.inputs):
            os._exit(9)
        if any(len(text) > MAX_PROMPT for text in request.inputs):
            reason = f"input is more than {MAX_PROMPT} tokens"
            failed = Failed(request.id, "context_length_exceeded", reason, "input")
            return self.send(StepEvents(failed=(failed,)))
        words = sum(len(t.split()) if isinstance(t, str) else len(t) for t in request.inputs)
        self.texts[request.id] = (request, words)

    def embed_step(self) -> tuple[Embedded, ...]:
        done = []
        for request_id, (request, words) in list(self.texts.items()):
            self.texts[request_id] = (request, words - 1)
            if words <= 1:
                del self.texts[request_id]
                done.append(self.embedded(request))
        return tuple(done)

    def embedded(self, request: EmbedRequest) -> Embedded:
        width = WIDTH if request.query is None else 1
        vectors = [struct.pack(f"<{width}f", *vector_of(text)[:width]) for text in request.inputs]
        counts = tuple(map(len, request.inputs))
        timings = Timings(prompt_n=sum(counts), prompt_ms=3.0, queue_ms=1.0)
        return Embedded(
            request_id=request.id,
            vectors=b"".join(vectors),
            width=width,
            prompt_tokens=counts,
            timings=timings,
        )

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        if not self.load():
            return
        while True:
            while not self.running and not self.texts:
                try:
                    self.accept(self.inbox.get(timeout=IDLE_BEAT_S))
                except queue.Empty:
                    self.send(StepEvents())
            while not self.inbox.empty():
                self.accept(self.inbox.get())
            self.step()
            time.sleep(self.script.get("token_s", 0.0))

    def step(self) -> None:
        deltas, finished = [], []
        for request_id, (request, words, done) in list(self.running.items()):
            most = request.params.max_tokens or len(words)
            if done < min(most, len(words)):
                if words[done] == "!die":
                    os._exit(9)
                if words[done] == "!spin":
                    spin(self.script["spin_s"])
                if words[done] == "!read":  # a step that computes one token of the prompt
                    self.running[request_id] = (request, words, done + 1)
                    continue
                deltas.append(self.delta(request, words, done))
                self.running[request_id] = (request, words, done + 1)
            else:
                del self.running[request_id]
                finished.append(self.finished(request, words, done))
        requests = {"cancelled": self.cancelled}
        sequences = tuple(self.sequence(*each) for each in self.running.values())
        stats = EngineStats(
            running=len(self.running),
            requests_total=requests,
            kv_tiers=tuple(KVTierStats(**tier) for tier in self.script.get("kv_tiers", ())),
            sequences=sequences,
        )
        self.send(StepEvents(tuple(deltas), tuple(finished), (), stats, self.embed_step()))

    def sequence(self, request: Request, words: list[str], done: int) -> SequenceStats:
        is_read = "!read" not in words[done:]
        return SequenceStats(
            request_id=request.id,
            client=request.client,
            state="decode" if is_read else "prefill",
            prompt_tokens=len(words),
            cached_tokens=0,
            computed_tokens=len(words) + done if is_read else done,
            generated_tokens=done if is_read else 0,
            ctx=request.ctx or 2048,
            age_s=time.monotonic() - request.arrived_s,
        )

    def delta(self, request: Request, words: list[str], done: int) -> Delta:
        text = words[done] if done == 0 else f" {words[done]}"
        logprobs: tuple[PositionLogprobs, ...] = ()
        if request.params.logprobs is not None:
            chosen = TokenLogprob(done, text, -0.5)
            logprobs = (PositionLogprobs(chosen, (chosen,) * request.params.logprobs),)
        return Delta(request.id, text, done + 1, logprobs, prompt_tokens=len(words) + 2)

    def finished(self, request: Request, words: list[str], done: int) -> Finished:
        ttft_ms = (time.monotonic() - request.arrived_s) * 1e3
        return Finished(
            request_id=request.id,
            reason="stop" if done == len(words) else "length",
            timings=Timings(
                cache_n=2,
                prompt_n=len(words),
                predicted_n=done,
                ttft_ms=ttft_ms,
                restored=tuple(RestoredTokens(*each) for each in self.script.get("restored", ())),
            ),
            prompt_tokens=len(words) + 2,
            completion_tokens=done,
            ctx=request.ctx or 2048,
            seed=request.params.seed,
            stop="</s>",
            notes=(f"client {request.client}", json.dumps(dataclasses.asdict(request.params))),
        )


if __name__ == "__main__":
    FakeEngine(FrameSocket(socket.socket(fileno=int(sys.argv[1])))).run()
