"""Prefixes that come back from RAM and disk: time to first token, beside llama-server's ways.

`ttft`: a prompt cold; from RAM, after another one took the KV cache; from disk, after a restart and
without the page cache; and as users have it, after a restart, when the idle engine has read the
disk into RAM. llama-server: cold, from its --cache-ram, and from a slot that is saved and restored
by hand, the call included. A prompt longer than the model's context is computed with a copy of the
model whose metadata names a longer one, which the rows say.
`chats`: more chats in turn than the KV cache holds. `handover`: prompts that arrive beside running
chats, read by another engine and fetched from it, and by one engine that does both. What saving
costs a chat is measured by benchmarks.saving_cost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks import llamacpp_tools, random_gguf
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import ModelLine, Report, command
from benchmarks.random_vocabulary import random_words
from benchmarks.servers import Localgen, llama_server
from benchmarks.streams import (
    ATTEMPTS,
    BenchClient,
    HttpBenchClient,
    LocalgenBenchClient,
    StreamFailed,
)
from benchmarks.stretched_gguf import stretch
from localgen.backends.engine_stats import kv_tier_name
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.bench.measured_request import MeasuredRequest
from localgen.bench.private_server import private_settings
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.hub.packaged import packaged_model

LOCALGEN, SERVER = "localgen", "llama-server"
PARTS = ("ttft", "chats", "handover")
# tokens of the KV cache besides those of a prompt
SPARE = 512
ANSWER = 2
# handover: tokens of a running chat, and prompts that arrive meanwhile
CHAT_TOKENS, NUM_PROMPTS = 400, 4
TARGET_DISK, TARGET_CHATS = 100.0, 1.0
_TIER_BYTES = 16 << 30
_SAVED_S = 60.0
# what the page cache gets from a load, and RAM from an engine that is idle afterwards
_READ_AHEAD_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBench:
    """Model, tools, report and settings of all parts.

    tokens_per_word: of random words, with this model's tokenizer. ctx_train: tokens of the context
    that the model names. note: on the model, for the names of tests.
    """

    model: Path
    tools: Tools | None
    report: Report
    settings: ServerSettings
    tokens_per_word: float
    ctx_train: int
    note: str = ""

    def with_ctx(self, ctx: int) -> TierBench:
        """This bench, with a copy of the model that allows ctx if the model does not."""
        if ctx <= self.ctx_train:
            return self
        model = stretch(self.model, ctx, self.settings.state_dir)
        return replace(self, model=model, ctx_train=ctx, note=", context stretched for the timing")

    def text(self, tokens: int, seed: str) -> str:
        """A prompt of about this many tokens, and not more."""
        return random_words(int(0.98 * tokens / self.tokens_per_word), seed)

    @contextlib.contextmanager
    def localgen(
        self, kv_tokens: int, ctx: int, kv_ram: int = _TIER_BYTES
    ) -> Iterator[BenchClient]:
        """A loaded model; it is unloaded at the end, so that the tiers are written."""
        sizes = LoadOptions(kv_ram=kv_ram, kv_disk=_TIER_BYTES)
        options = replace(sizes, ctx=ctx, kv_tokens=kv_tokens, draft="none")
        server = Localgen(self.settings, self.model, options)
        try:
            yield LocalgenBenchClient(server.client(), server.model)
            _await_saved(server)
        finally:
            server.unload()
            server.close()

    @contextlib.contextmanager
    def server(self, ctx: int, folder: Path, slots: int = 1) -> Iterator[httpx.Client]:
        """llama-server with a folder for its slots."""
        assert self.tools is not None
        threads = num_physical_cores()
        more = ("--slot-save-path", f"{folder}/", "--cache-ram", str(_TIER_BYTES >> 20))
        with llama_server(
            self.tools, self.model, slots=slots, slot_ctx=ctx, threads=threads, more=more
        ) as http:
            yield http

    def add(self, test: str, side: str, seconds: list[float]) -> float:
        """Enter times; returns their median."""
        self.report.add(test, side, "s", seconds)
        shown = statistics.median(seconds)
        print(f"{test}: {side}: {shown:.3f} s", file=sys.stderr, flush=True)
        return shown

    def speedup(self, test: str, cold_s: float, warm_s: float) -> None:
        """Enter how many times faster a prefix was than computing it."""
        series = self.report.add(test, LOCALGEN, "×", [cold_s / warm_s])
        self.report.least(series, TARGET_DISK)


def first_token_s(stream: MeasuredRequest) -> float:
    return stream.first_s - stream.sent_s


def time_to_first_token(bench: TierBench, length: int, *, with_ram: bool, folder: Path) -> None:
    """Part `ttft` for a prompt of this many tokens."""
    ours, theirs = bench.text(length, "a"), bench.text(length, "b")
    ctx = length + SPARE
    bench = bench.with_ctx(ctx)
    name = f"TTFT {length:,} tokens{bench.note}"
    with bench.localgen(ctx, ctx) as client:
        cold_s = bench.add(name, f"{LOCALGEN} cold", [first_token_s(client.ask(ours, ANSWER))])
        bench.add(name, f"{LOCALGEN} KV cache", [first_token_s(client.ask(ours, ANSWER))])
        if with_ram:
            client.ask(theirs, ANSWER)
            bench.add(name, f"{LOCALGEN} RAM", [first_token_s(client.ask(ours, ANSWER))])
    with bench.localgen(ctx, ctx, kv_ram=0) as client:
        time.sleep(_READ_AHEAD_S)
        _drop_from_page_cache(bench.settings.state_dir / "kv")
        disk_s = _add_restored(bench, name, client.ask(ours, ANSWER))
    with bench.localgen(ctx, ctx) as client:
        time.sleep(_READ_AHEAD_S)
        _add_restored(bench, name, client.ask(ours, ANSWER))
    bench.speedup(f"{name}: cold ÷ disk", cold_s, disk_s)
    if bench.tools is None:
        return
    with bench.server(ctx, folder) as http:
        client = HttpBenchClient(http)
        bench.add(name, f"{SERVER} cold", [first_token_s(client.ask(ours, ANSWER))])
        _slot(http, "save")
        if with_ram:
            client.ask(theirs, ANSWER)
            bench.add(name, f"{SERVER} --cache-ram", [first_token_s(client.ask(ours, ANSWER))])
    _drop_from_page_cache(folder)
    with bench.server(ctx, folder) as http:
        started_s = time.perf_counter()
        _slot(http, "restore")
        stream = HttpBenchClient(http).ask(ours, ANSWER)
        bench.add(name, f"{SERVER} slot restored by hand", [stream.first_s - started_s])


def _add_restored(bench: TierBench, name: str, stream: MeasuredRequest) -> float:
    """Enter the time of a prompt after a restart, with the tiers that it came from."""
    assert stream.timings is not None
    restored = stream.timings.restored
    if sum(each.tokens for each in restored) < stream.prompt_tokens - 200:
        raise StreamFailed(f"of {stream.prompt_tokens:,} tokens, tiers had {restored}")
    tiers = " and ".join(kv_tier_name(each.tier) for each in restored)
    return bench.add(name, f"{LOCALGEN} {tiers}, restarted", [first_token_s(stream)])


def chats_in_turn(bench: TierBench, chats: int, length: int, rounds: int, folder: Path) -> None:
    """Part `chats`: each chat again and again, with a KV cache for two of them."""
    prompts = [bench.text(length, f"chat {number}") for number in range(chats)]
    name = f"{chats} chats of {length:,} tokens, KV cache for 2, TTFT from the second round on"
    ctx = length + SPARE

    def play(client: BenchClient) -> list[float]:
        seconds = []
        for number in range(1 + rounds):
            for index, prompt in enumerate(prompts):
                turns = [random_words(8, f"{index} {turn}") for turn in range(number)]
                seconds.append(first_token_s(client.ask(" ".join([prompt, *turns]), ANSWER)))
        return seconds[chats:]

    with bench.localgen(2 * ctx, ctx) as client:
        ours = bench.report.add(name, LOCALGEN, "s", play(client))
    if bench.tools is not None:
        with bench.server(ctx, folder, slots=2) as http:
            theirs = bench.report.add(name, SERVER, "s", play(HttpBenchClient(http)))
        bench.report.ratio(ours, theirs, TARGET_CHATS, at_least=False)


def handover(bench: TierBench, length: int, chats: int) -> None:
    """Part `handover`: as many threads as cores for one engine, half of them for each of two."""
    threads = num_physical_cores()
    options = LoadOptions(ctx=2048, kv_tokens=8192, kv_disk=0, draft="none", threads=threads)
    with _engine(bench.settings, bench.model, options) as one:
        _beside_chats(bench, "one engine", [one], length, chats)
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        half = replace(options, threads=max(1, threads // 2))
        address = f"{folder}/kv.sock"
        other = replace(bench.settings, runtime_dir=Path(folder))
        with (
            _engine(bench.settings, bench.model, replace(half, kv_listen=address)) as reading,
            _engine(other, bench.model, replace(half, kv_peer=address)) as answering,
        ):
            _beside_chats(bench, "two engines", [reading, answering], length, chats)
        with LocalClient(other) as client:
            client.shutdown()


@contextlib.contextmanager
def _engine(settings: ServerSettings, model: Path, options: LoadOptions) -> Iterator[Localgen]:
    server = Localgen(settings, model, options)
    try:
        yield server
    finally:
        server.unload()
        server.close()


def _beside_chats(
    bench: TierBench, side: str, servers: list[Localgen], length: int, chats: int
) -> None:
    """Send prompts to each server in turn, while the last one answers chats."""
    clients = [LocalgenBenchClient(each.client(), each.model) for each in servers]
    last = servers[-1]
    talking = [LocalgenBenchClient(last.client(), last.model) for _ in range(chats)]
    with ThreadPoolExecutor(chats) as pool:
        running = [
            pool.submit(each.ask, bench.text(100, f"chat {number}"), CHAT_TOKENS)
            for number, each in enumerate(talking)
        ]
        time.sleep(2)
        seconds = []
        for number in range(NUM_PROMPTS):
            prompt, started_s = bench.text(length, f"prompt {number}"), time.perf_counter()
            for client in clients[:-1]:
                client.ask(prompt, 1)
            seconds.append(clients[-1].ask(prompt, ANSWER).first_s - started_s)
        ended_s = time.perf_counter()
        streams = [each.result() for each in running]
    gaps = sorted(
        (after - before) * 1e3
        for stream in streams
        for (before, _), (after, _) in itertools.pairwise(stream.arrivals)
        if before < ended_s
    )
    name = f"{NUM_PROMPTS} prompts of {length:,} tokens beside {chats} chats"
    bench.add(f"{name}, TTFT", side, seconds)
    for share in (0.5, 0.99):
        value = gaps[int(share * (len(gaps) - 1))]
        bench.report.add(f"{name}, ITL p{100 * share:.0f} of the chats", side, "ms", [value])
        print(f"{side}: ITL p{100 * share:.0f} {value:.0f} ms", file=sys.stderr, flush=True)


def _await_saved(server: Localgen) -> None:
    """Wait until the engine has written what it saves while it is idle."""
    deadline, before = time.monotonic() + _SAVED_S, -1
    client = server.client()
    client.connect()
    while time.monotonic() < deadline:
        (model,) = client.stats()["models"]
        tiers = model["stats"]["kv_tiers"]
        now = sum(tier["num_bytes"] for tier in tiers)
        if now == before:
            return
        before = now
        time.sleep(6)  # statistics of an idle engine are 5 s old


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _slot(http: httpx.Client, action: str) -> None:
    for _ in range(ATTEMPTS):
        # llama-server closes connections that it has kept
        with contextlib.suppress(httpx.RemoteProtocolError):
            reply = http.post(f"/slots/0?action={action}", json={"filename": "prefix"})
            if reply.status_code != 200:
                raise StreamFailed(f"llama-server: slot {action}: {reply.text}")
            return
    raise StreamFailed(f"llama-server closed the connection at slot {action}")


def _model(name: str) -> Path:
    if name in random_gguf.SHAPES:
        return random_gguf.cached(random_gguf.SHAPES[name])
    return packaged_model(name).path


def _bench(model: Path, settings: ServerSettings, tools: Tools | None) -> TierBench:
    server = Localgen(settings, model, LoadOptions(ctx=512))
    info: ModelInfo = server.info
    words = 100
    stream = LocalgenBenchClient(server.client(), server.model).ask(random_words(words, ""), ANSWER)
    server.unload()
    server.close()
    line = ModelLine(info.description, info.size_bytes, info.params)
    report = Report(line, 1, False, info.options.threads or 0, {"kv_ram": _TIER_BYTES})
    return TierBench(
        model=model,
        tools=tools,
        report=report,
        settings=settings,
        tokens_per_word=stream.prompt_tokens / words,
        ctx_train=info.ctx_train,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.kv_tiers")
    parser.add_argument("--tools", type=Path, help="folder with llama-server")
    parser.add_argument("--no-peer", action="store_true", help="measure localgen alone")
    parser.add_argument("--model", choices=("1b", "tiny", "smollm2"), default="1b")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=(4096, 16384))
    parser.add_argument("--ram-up-to", type=int, default=4096, help="longest prompt evicted to RAM")
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--chat-tokens", type=int, default=7500)
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of handover")
    parser.add_argument("--rounds", type=int, default=2, help="of chats")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)

    def times(bench: TierBench, folder: Path) -> None:
        for each in options.lengths:
            time_to_first_token(bench, each, with_ram=each <= options.ram_up_to, folder=folder)

    parts: dict[str, Callable[[TierBench, Path], None]] = {
        "ttft": times,
        "chats": lambda bench, folder: chats_in_turn(
            bench, options.chats, options.chat_tokens, options.rounds, folder
        ),
        "handover": lambda bench, _: handover(bench, options.prompt_tokens, 2),
    }
    try:
        tools = None if options.no_peer else Tools(options.tools or llamacpp_tools.build())
        model = _model(options.model)
        with private_settings() as settings, tempfile.TemporaryDirectory() as folder:
            bench = _bench(model, settings, tools)
            for part in options.only:
                parts[part](bench, Path(folder))
    except (ToolFailed, StreamFailed, LocalgenError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    bench.report.commands += [
        command("benchmarks.kv_tiers", arguments),
        *(tools.commands if tools is not None else ()),
    ]
    print(bench.report.text())
    bench.report.save("kv-tiers", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
