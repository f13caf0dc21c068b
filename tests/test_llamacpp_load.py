"""Damaged, hostile and unsupported files, and options: errors that give the reason."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import gguf_files as files
import llama_cpp.llama_cpp as C
import pytest
from models import TINY_GGUF, Bench

from localgen.backends.engine import wire
from localgen.backends.engine.process import main
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.native import correct_size
from localgen.backends.messages import FrameSocket
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Failed, Finished, Message, Request, StepEvents

HANG_S = 30
ASK = Request(id="r", prompt_tokens=(5, 6, 7), params=SamplingParams(max_tokens=4, seed=1))


@dataclass
class Outcome:
    """Messages of an engine process about a file, and how it ended."""

    loaded: wire.LoadComplete | None = None
    refused: wire.LoadError | None = None
    ends: list[Finished | Failed] = field(default_factory=list)
    status: int | None = None
    stderr: str = ""

    @property
    def crashed(self) -> bool:
        """Killed by a signal, which the server reports as an error of that model."""
        return self.status is not None and self.status < 0

    def take(self, message: wire.WireMessage) -> bool:
        """Store a message of the engine; returns whether more will follow."""
        match message:
            case wire.LoadComplete():
                self.loaded = message
            case wire.LoadError():
                self.refused = message
                return False
            case StepEvents(finished=finished, failed=failed):
                self.ends += [*finished, *failed]
        return not self.ends


# forks processes that have imported the engine, which takes longer than loading a small file
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    ["localgen.backends.engine.process", "localgen.backends.llamacpp.loader"]
)


def _run_engine(server: socket.socket, stderr: str) -> None:
    """An engine process, with its standard error in a file."""
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    sys.exit(main(server.detach(), load_llamacpp_model))


def engine(path: Path, options: LoadOptions | None = None, request: Request = ASK) -> Outcome:
    """Load a file in an engine process and, if it loads, send one request."""
    options = options or LoadOptions(parallel=2, threads=1)
    ours, theirs = socket.socketpair()
    outcome = Outcome()
    with tempfile.NamedTemporaryFile("r", errors="replace") as stderr:
        process = _FORKING.Process(target=_run_engine, args=(theirs, stderr.name))
        process.start()
        theirs.close()
        with ours:
            try:
                with contextlib.suppress(EOFError, BrokenPipeError):
                    load = ModelLoadRequest("m", str(path), options)
                    _converse(FrameSocket(ours), load, outcome, request)
            except TimeoutError:
                process.kill()
                pytest.fail(f"the engine hangs on {path.name}")
        process.join(HANG_S)
        outcome.status = process.exitcode
        outcome.stderr = stderr.read()
    return outcome


def _converse(
    sock: FrameSocket, load: ModelLoadRequest, outcome: Outcome, request: Request
) -> None:
    sock.send(wire.CODEC.encode(load))
    while outcome.take(message := wire.CODEC.decode(sock.receive(time.monotonic() + HANG_S))):
        if isinstance(message, wire.LoadComplete):
            sock.send(wire.CODEC.encode(wire.Submit(request)))


def refusal(path: Path, options: LoadOptions | None = None) -> str:
    """The error of a file that must be rejected: one line that names it."""
    outcome = engine(path, options)
    assert outcome.refused, outcome
    assert outcome.refused.code == "load_failed"
    message = outcome.refused.message
    assert str(path) in message
    assert "\n" not in message
    assert "gave no reason" not in message
    assert "Traceback" not in outcome.stderr
    return message


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "share", [0.001, 0.005, 0.0111, 0.2, 0.9, 0.999999], ids=lambda share: f"{share:.4%}"
)
def test_truncated_file_is_rejected(tmp_path: Path, share: float) -> None:
    path = tmp_path / "short.gguf"
    whole = TINY_GGUF.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refusal(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"GG", b"GGUF", bytes(4096), b"This is a text, no model.\n" * 100, b"\xff" * 4096],
    ids=["empty", "two bytes", "magic only", "zeros", "text", "ones"],
)
def test_file_that_is_not_gguf_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize(
    ("offset", "new"),
    [
        (0, b"GGML"),
        (0, b"FUGG"),
        (4, files.u32(0)),
        (4, files.u32(99)),
        (4, files.u32(3 << 24)),  # the other byte order
        (8, files.u64(2**62)),
        (8, files.u64(2**40)),
        (8, files.u64(57)),
        (16, files.u64(2**62)),
        (16, files.u64(10**6)),
        (24, files.u64(2**63 - 1)),
        (24, files.u64(2**40)),
        (24, files.u64(0)),
    ],
)
def test_inconsistent_header_is_rejected(tmp_path: Path, offset: int, new: bytes) -> None:
    refusal(files.patched(tmp_path / "lies.gguf", {offset: new}))


def test_missing_file_and_folder_are_rejected(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf").endswith("no such file")
    assert "folder" in refusal(tmp_path)


def flipped(target: Path, number: int) -> Path:
    """The built-in model with some header bytes changed; each number gives one file."""
    chance = random.Random(number)
    vocabulary, tensor_list, tensors = files.header_bytes()
    # settings, the vocabulary (100 kB) and the list of tensors, equally often
    begin, end = ((24, vocabulary), (vocabulary, tensor_list), (tensor_list, tensors))[number % 3]
    changes = {
        chance.randrange(begin, end): bytes([chance.randrange(256)])
        for _ in range(chance.choice((1, 3, 10)))
    }
    return files.patched(target, changes)


# numbers that a reader must check: some of them make llama.cpp abort
ODD_NUMBERS: list[tuple[str, float]] = [
    ("llama.block_count", 0),
    ("llama.block_count", 1),
    ("llama.block_count", 1000),
    ("llama.block_count", 2**31),
    ("llama.attention.head_count", 0),
    ("llama.attention.head_count_kv", 0),
    ("llama.attention.head_count_kv", 1000),
    ("llama.attention.key_length", 1000),
    ("llama.attention.value_length", 0),
    ("llama.attention.layer_norm_rms_epsilon", -1.0),
    ("llama.attention.layer_norm_rms_epsilon", math.nan),
    ("llama.rope.freq_base", math.nan),
    ("llama.rope.dimension_count", 3),
    ("llama.context_length", 0),
    ("llama.context_length", 1),
    ("llama.context_length", 2**31),
    ("llama.embedding_length", 0),
    ("llama.embedding_length", 2**32 - 1),
    ("llama.vocab_size", 2**31),
    ("tokenizer.ggml.bos_token_id", 2**31),
    ("tokenizer.ggml.eos_token_id", 4096),
    ("general.file_type", 2**32 - 1),
    ("general.quantization_version", 0),
]


def verdict(path: Path) -> str | None:
    """What is wrong with an engine's reaction to this file; None if nothing."""
    outcome = engine(path)
    path.unlink()
    if outcome.refused:
        named = outcome.refused.code == "load_failed" and str(path) in outcome.refused.message
        return None if named else f"{path.name}: {outcome.refused}"
    if outcome.crashed or outcome.ends:
        return None
    return f"{path.name}: status {outcome.status}, {outcome.stderr}"


def test_fuzzed_headers_end_in_a_model_an_error_or_a_dead_engine(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        paths = (flipped(tmp_path / f"flipped-{number}.gguf", number) for number in range(39))
        assert [wrong for wrong in threads.map(verdict, paths) if wrong] == []


def test_odd_numbers_end_in_a_model_an_error_or_a_dead_engine(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        paths = (
            files.with_number(tmp_path / f"{key}-{value:g}.gguf", key, value)
            for key, value in ODD_NUMBERS
        )
        assert [wrong for wrong in threads.map(verdict, paths) if wrong] == []


def test_an_engine_that_llama_cpp_aborts_ends_at_once() -> None:
    program = (
        "import localgen.backends.llamacpp.loader, llama_cpp.llama_cpp as C\n"
        "C._lib.ggml_abort(b'a.c', 1, b'GGML_ASSERT(%s) failed', b'0')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == -signal.SIGABRT
    assert "GGML_ASSERT" in done.stderr
    assert "Thread debugging" not in done.stderr  # no debugger was called


def test_numbers_that_llama_cpp_aborts_on_are_refused(tmp_path: Path) -> None:
    message = refusal(files.with_number(tmp_path / "deep.gguf", "llama.block_count", 1000))
    assert "llama.block_count is '1000', it must be 1 to 512" in message


@pytest.mark.parametrize("tensor", ["output_norm.weight", "token_embd.weight"])
def test_a_model_of_nan_is_refused(tmp_path: Path, tensor: str) -> None:
    assert "its weights produce NaN" in refusal(files.with_nan(tmp_path / "nan.gguf", tensor))


# -- other kinds of models --------------------------------------------------------------------


def test_reranker_is_rejected(tmp_path: Path) -> None:
    path = files.bert(tmp_path / "rank.gguf", C.LLAMA_POOLING_TYPE_RANK)
    assert "is a reranking model without a classifier" in refusal(path)


def test_an_embedding_model_loads_and_refuses_to_chat(tmp_path: Path) -> None:
    chat = Request(id="r", messages=(Message("user", "hi"),))
    outcome = engine(files.bert(tmp_path / "bert.gguf"), request=chat)
    assert outcome.loaded
    assert not outcome.loaded.info.generates
    assert outcome.loaded.info.embedding_width == 32
    (end,) = outcome.ends
    assert isinstance(end, Failed)
    assert end.code == "invalid_request"
    assert "is an embedding model" in end.message


def test_embedding_model_of_nan_is_rejected(tmp_path: Path) -> None:
    path = files.bert(tmp_path / "nan.gguf")
    reader = gguf.GGUFReader(path)
    (norm,) = [t for t in reader.tensors if t.name == "token_embd_norm.weight"]
    content = bytearray(path.read_bytes())
    begin = int(norm.data_offset)
    content[begin : begin + int(norm.n_bytes)] = b"\xff" * int(norm.n_bytes)
    path.write_bytes(content)
    assert "its weights produce NaN" in refusal(path)


def test_model_without_vocabulary_is_rejected(tmp_path: Path) -> None:
    changes: dict[str, files.Change] = {"tokenizer.ggml.model": ("none", files.STRING)}
    assert "vocabulary" in refusal(files.rewrite(tmp_path / "mute.gguf", changes))


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    path = files.rewrite(tmp_path / "plain.gguf", {"tokenizer.chat_template": None})
    chat = Request(id="r", messages=(Message("user", "hi"),))
    outcome = engine(path, request=chat)
    assert outcome.loaded
    assert any("no chat template" in note for note in outcome.loaded.info.notes)
    (end,) = outcome.ends
    assert isinstance(end, Failed)
    assert "--chat-template FILE" in end.message
    (plain,) = engine(path).ends
    assert isinstance(plain, Finished)


def test_a_model_with_a_broken_chat_template(tmp_path: Path) -> None:
    changes: dict[str, files.Change] = {"tokenizer.chat_template": ("{% if %}", files.STRING)}
    path = files.rewrite(tmp_path / "broken.gguf", changes)
    message = refusal(path)
    assert "does not compile" in message
    assert "--chat-template FILE" in message
    replaced = LoadOptions(parallel=2, chat_template="{{ messages[0].content }}")
    assert engine(path, replaced).loaded


@pytest.mark.parametrize(
    ("key", "value"), [("temp", float("nan")), ("temp", -3.0), ("top_k", float("inf"))]
)
def test_sampling_defaults_that_make_no_sense_are_left_out(
    tmp_path: Path, key: str, value: float
) -> None:
    changes: dict[str, files.Change] = {f"general.sampling.{key}": (value, files.FLOAT32)}
    outcome = engine(files.rewrite(tmp_path / "odd.gguf", changes))
    assert outcome.loaded, outcome
    assert any("sampling defaults" in note for note in outcome.loaded.info.notes)
    assert isinstance(outcome.ends[0], Finished)


def test_shards_are_one_model(tmp_path: Path) -> None:
    files.rewrite(tmp_path / "tiny.gguf", {}, split_max_tensors=30)
    first, second = sorted(tmp_path.glob("*.gguf"))
    assert [first.name, second.name] == ["tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]
    assert answer(first) == answer(TINY_GGUF)
    second.unlink()
    assert second.name in refusal(first)


# -- options ----------------------------------------------------------------------------------


def answer(path: Path, **options: Any) -> str:
    """Greedy answer of a model loaded with these options."""
    bench = Bench(LoadOptions(parallel=2, **options), path)
    greedy = SamplingParams(temperature=0, max_tokens=60)
    (reply,) = bench.ask([[Message("user", "What is 17 + 25?")]], greedy)
    bench.close()
    return reply.text


def test_answers_are_the_same_without_mmap() -> None:
    assert answer(TINY_GGUF, mmap=False) == answer(TINY_GGUF, mmap=True)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("flash_attn", ["auto", "on"])
def test_every_cache_type_answers(kind: str, flash_attn: str) -> None:
    text = answer(TINY_GGUF, cache_type_k=kind, cache_type_v=kind, flash_attn=flash_attn)
    if kind in ("f32", "f16", "bf16", "q8_0"):
        assert "42" in text
    else:
        assert text


def loading(**options: Any) -> LocalgenError:
    with pytest.raises(LocalgenError) as caught:
        load_llamacpp_model(
            ModelLoadRequest("tiny", str(TINY_GGUF), LoadOptions(**options)), lambda share: None
        )
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"cache_type_k": "q3_k"}, "cache_type_k", ["q3_k", "q8_0", "f16"]),
        ({"cache_type_v": "int8"}, "cache_type_v", ["int8", "q8_0"]),
        ({"flash_attn": "maybe"}, "flash_attn", ["maybe", "auto", "on", "off"]),
        (
            {"flash_attn": "off", "cache_type_v": "q8_0"},
            "cache_type_v",
            ["needs flash attention", "--flash-attn auto", "--cache-type-v f16"],
        ),
        ({"ctx": 2049}, "ctx", ["2,049", "2,048"]),
        ({"ctx": 0}, "ctx", ["0", "at least 1"]),
        ({"ctx": 1024, "kv_tokens": 512}, "kv_tokens", ["512", "1,024"]),
        (
            {"ctx": 1024, "kv_tokens": 2048, "kv_unified": False},
            "kv_tokens",
            ["2,048 tokens in 4 parts", "1,024", "--kv-tokens 4,096"],
        ),
        ({"parallel": 0}, "parallel", ["0", "at least 1"]),
        ({"parallel": 300}, "parallel", ["300", "256"]),
        ({"parallel": 8, "max_batch_tokens": 7}, "max_batch_tokens", ["7", "8"]),
        ({"max_batch_tokens": 0}, "max_batch_tokens", ["0"]),
        ({"threads": 0}, "threads", ["0", "at least 1"]),
        ({"threads": 9999}, "threads", ["9999", "at most", "processors"]),
        ({"threads_batch": -1}, "threads_batch", ["-1", "at least 1"]),
        ({"max_queue": 0}, "max_queue", ["0"]),
        ({"itl_target_ms": 0.5}, "itl_target_ms", ["0.5"]),
        ({"itl_target_ms": float("nan")}, "itl_target_ms", ["nan"]),
        ({"gpu_layers": -2}, "gpu_layers", ["-2"]),
    ],
)
def test_unsupported_options_are_rejected(
    options: dict[str, Any], param: str, says: list[str]
) -> None:
    error = loading(**options)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert [words for words in says if words not in error.message] == []


@pytest.mark.parametrize("layers", [1, -1, 99])
def test_gpu_layers_without_a_gpu(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    monkeypatch.setattr("localgen.backends.llamacpp.options.supports_gpu", lambda: False)
    error = loading(gpu_layers=layers)
    assert error.param == "gpu_layers"
    assert "no GPU support" in error.message


@pytest.mark.parametrize(
    ("kind", "why"), [("has_sliding_window", "sliding"), ("is_recurrent", "state")]
)
def test_parts_need_a_cache_that_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    monkeypatch.setattr(f"localgen.backends.llamacpp.native.LlamaModel.{kind}", True)
    error = loading(kv_unified=False)
    assert error.param == "kv_unified"
    assert TINY_GGUF.name in error.message
    assert why in error.message


@pytest.mark.parametrize(
    ("given", "in_parts"),
    [
        ({"parallel": 3, "ctx": 300}, True),
        ({"parallel": 3, "ctx": 300, "kv_unified": True}, False),
        ({"parallel": 3, "ctx": 300, "kv_tokens": 900}, False),
        ({"parallel": 3}, False),
        ({"ctx": 300}, False),
    ],
)
def test_parts_where_number_and_size_are_given(given: dict[str, Any], in_parts: bool) -> None:
    model = load_llamacpp_model(
        ModelLoadRequest("tiny", str(TINY_GGUF), LoadOptions(**given)), lambda share: None
    )
    model.runner.close()
    assert model.info.options.kv_unified is not in_parts
    said = [note for note in model.info.notes if "--kv-unified" in note]
    assert said == [
        "the KV cache is split into 3 parts of 300 tokens; --kv-unified shares one pool, "
        "and keeps prefixes in RAM and on disk"
    ] * (in_parts)


def test_no_parts_where_they_do_not_fit() -> None:
    options = LoadOptions(parallel=32, ctx=2048)
    for memory, unified in ((1 << 30, False), (200 << 20, True)):
        request = ModelLoadRequest("tiny", str(TINY_GGUF), options, memory_bytes=memory)
        model = load_llamacpp_model(request, lambda share: None)
        model.runner.close()
        assert model.info.options.kv_unified is unified


@pytest.mark.parametrize("kind", ["has_sliding_window", "is_recurrent"])
def test_no_parts_where_a_cache_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(f"localgen.backends.llamacpp.native.LlamaModel.{kind}", True)
    options = LoadOptions(parallel=3, ctx=300)
    model = load_llamacpp_model(
        ModelLoadRequest("tiny", str(TINY_GGUF), options), lambda share: None
    )
    model.runner.close()
    assert model.info.options.kv_unified is True


def test_a_pool_larger_than_memory() -> None:
    error = loading(kv_tokens=2**40)
    assert error.code == "out_of_memory"
    assert "GB" in error.message
    in_parts = loading(kv_tokens=2**40, kv_unified=False)
    assert "fewer than 4 parts (--parallel)" in in_parts.message


def test_an_error_reaches_the_server_with_its_code() -> None:
    outcome = engine(TINY_GGUF, LoadOptions(parallel=300))
    assert outcome.refused
    assert outcome.refused.code == "invalid_request"


@pytest.mark.parametrize(
    ("description", "num_params", "shown"),
    [
        ("llama 256M Q4_1", 134_515_008, "llama 135M Q4_1"),
        ("llama ?B F16", 5_770_496, "llama 5.8M F16"),
        ("llama ?B", 2_000_000_000, "llama 2.0B"),
        ("qwen2 7B Q4_K - Medium", 7_615_616_512, "qwen2 7B Q4_K - Medium"),
        ("gemma 2B F16", 2_506_172_416, "gemma 2B F16"),
        ("gemma3 1B Q8_0", 999_885_952, "gemma3 1B Q8_0"),
        ("llama 8x7B Q4_0", 46_702_792_704, "llama 8x7B Q4_0"),
        ("qwen3moe 30B.A3B Q4_0", 30_532_122_624, "qwen3moe 30B.A3B Q4_0"),
        ("llama 1.7B Q4_0", 900_000_000, "llama 900M Q4_0"),
    ],
)
def test_a_description_has_the_size_of_the_model(
    description: str, num_params: int, shown: str
) -> None:
    assert correct_size(description, num_params) == shown
