"""The requests of llama.vim and llama.vscode, field by field as they send them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import gguf_files
import httpx
import pytest
from real_server import real_server
from test_answers import ByteTokenizer

from localgen.backends.engine.output_processor import OutputProcessor
from localgen.backends.engine.scheduler import SequenceOutput
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.line_limiter import LineLimiter
from localgen.backends.types import LineLimits

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX = "def add(a, b):\n", "\n\nprint(add(1, 2))\n"
# llama.vim has reltime(), llama.vscode milliseconds
EXTRA = [{"text": "import math\n", "time": [1764175000, 815], "filename": "a.py"}] * 4
VIM_FIELDS = [
    *("content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"),
    *("timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms"),
    *("timings/predicted_per_token_ms", "timings/predicted_per_second"),
    *("truncated", "tokens_cached"),
]
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": EXTRA,
    "prompt": "    return",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": VIM_FIELDS,
}
VIM_RING: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": [{"text": "import math\n", "time": 1764175000815, "filename": "a.py"}],
    "prompt": "    return",
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module", params=["llamacpp", "cuda"])
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    if request.param == "cuda":
        pytest.importorskip("torch")
    model = gguf_files.infill(tmp_path_factory.mktemp("plugins") / "coder.gguf", FIM)
    options = ["--ctx", "512", "--backend", str(request.param)]
    options += ["--device", "cpu"] if request.param == "cuda" else []
    with (
        real_server(str(model), *options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def post(http: httpx.Client, path: str = "/infill", **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_llama_vim_gets_a_suggestion(http: httpx.Client) -> None:
    reply = http.post("/infill", json=VIM)
    assert reply.status_code == 200, reply.text
    # the plugin looks at the text before it decodes it
    assert re.match(r"\s*\{", reply.text)
    assert re.search(r'"content"\s*:"', reply.text)
    whole = reply.json()
    assert set(whole) <= set(VIM_FIELDS)
    # without one of these it shows no figures
    for name in ("prompt_n", "prompt_ms", "prompt_per_second"):
        assert whole[f"timings/{name}"] > 0
    for name in ("predicted_n", "predicted_ms", "predicted_per_second"):
        assert whole[f"timings/{name}"] >= 0
    assert (whole["truncated"], whole["tokens_cached"] > 0) == (False, True)


def test_llama_vim_warms_up_with_other_files(http: httpx.Client) -> None:
    files = [{**each, "filename": "b.py"} for each in EXTRA]
    assert post(http, **(VIM_RING | {"input_extra": files})) == {}
    whole = post(http, **(VIM | {"input_extra": files, "response_fields": []}))
    # the files come first, and were computed
    assert whole["timings"]["cache_n"] > 20
    assert post(http, **(VIM_RING | {"response_fields": ["content", "tokens_predicted"]})) == {
        "content": "",
        "tokens_predicted": 0,
    }


def test_llama_vim_edits_by_instruction(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    cache = {"id_slot": 7, "messages": MESSAGES, "cache_prompt": True}
    warm = {"samplers": [], "n_predict": 0, "stream": False, "response_fields": [""]}
    empty = post(http, path, **cache, **warm)
    assert (empty["choices"][0]["message"]["content"], empty["usage"]["completion_tokens"]) == (
        "",
        0,
    )
    edit = {"min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "stream": True}
    reply = http.post(path, json=cache | edit | {"max_tokens": 24})
    assert reply.status_code == 200, reply.text
    chunks = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(texts).strip()


def test_llama_vscode_gets_three_suggestions(http: httpx.Client) -> None:
    answers = post(http, **VSCODE)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert all(answer["stop"] and isinstance(answer["content"], str) for answer in answers)
    prepared = {name: VSCODE[name] for name in ("id_slot", "cache_prompt", "t_max_prompt_ms")}
    empty: dict[str, Any] = {"input_prefix": "", "input_suffix": "", "prompt": ""}
    warm = empty | {"input_extra": EXTRA, "n_predict": 0, "samplers": [], "t_max_predict_ms": 1}
    whole = post(http, **prepared, **warm)
    assert (whole["content"], whole["stop_type"]) == ("", "limit")


def test_samplers_switch_others_off(http: httpx.Client) -> None:
    """With top_k 1 the best token is drawn at any temperature; without top_k it is not."""
    body = {"prompt": "Once", "n_predict": 24, "top_k": 1, "temperature": 3.0, "seed": 5}
    greedy = post(http, "/completion", **(body | {"temperature": 0}))["content"]
    assert post(http, "/completion", **body, samplers=["top_k"])["content"] == greedy
    assert post(http, "/completion", **body, samplers=["temperature"])["content"] != greedy
    off = post(http, "/completion", **body, samplers=[])["content"]
    plain = body | {"top_k": 0, "temperature": 1.0}
    same: dict[str, Any] = {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert off == post(http, "/completion", **(plain | same))["content"]


def test_a_completion_may_compute_only_its_prompt(http: httpx.Client) -> None:
    whole = post(http, "/v1/completions", prompt="Once upon a time", n_predict=0)
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("", 0)


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/completion", {"samplers": ["temperature", "top_k"]}, "order is fixed"),
        ("/completion", {"samplers": ["top_k", "top_k"]}, "order is fixed"),
        ("/completion", {"samplers": ["best"]}, "unknown sampler best"),
        ("/completion", {"samplers": "kpt"}, "samplers"),
        ("/completion", {"samplers": ["top_k"], "mirostat": 2}, "with mirostat"),
        ("/completion", {"n_predict": 5, "max_tokens": 6}, "give one"),
        ("/completion", {"n": 2, "n_cmpl": 3}, "n_cmpl"),
        ("/completion", {"n_cmpl": 17}, "n must be"),
        ("/completion", {"n_indent": -1}, "n_indent"),
        ("/completion", {"prompt": ["a"] * 60, "n_cmpl": 2}, "limit of 64 choices"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, fields: Any, said: str) -> None:
    reply = http.post(path, json={"prompt": "a", **fields})
    assert (reply.status_code, said in reply.text) == (400, True), reply.text


def test_the_sampler_for_infill(http: httpx.Client) -> None:
    """It cannot force an end where none may be, and is a note where there is none."""
    whole = post(http, **(VIM | {"response_fields": ["localgen/notes"]}))
    is_left_out = "samplers: infill is left out" in str(whole["localgen/notes"])
    (model,) = http.get("/v1/stats").json()["models"]
    assert is_left_out is (model["info"]["backend"] == "cuda")
    if is_left_out:
        return
    for fields, said in (
        ({"samplers": ["infill"]}, "needs top_k"),
        ({"samplers": ["top_k", "infill"], "top_k": 1000}, "needs top_k"),
        ({"grammar": 'root ::= "a"'}, "cannot be used with grammar"),
        ({"min_tokens": 3}, "cannot be used with min_tokens"),
        ({"ignore_eos": True}, "cannot be used with ignore_eos"),
    ):
        reply = http.post("/infill", json=VIM | fields)
        assert (reply.status_code, said in reply.text) == (400, True), reply.text
    chat = {"messages": MESSAGES, "samplers": ["top_k", "infill"]}
    assert "not for messages" in http.post("/v1/chat/completions", json=chat).text


def test_a_line_with_too_little_indentation_ends_the_answer(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "n_predict": 100}
    whole = post(http, "/completion", **body)["content"]
    assert "\n" in whole.strip()
    cut = post(http, "/completion", **body, n_indent=1)
    first = whole.index("\n") + 1
    assert cut["content"] == whole[:first]
    assert (cut["stop_type"], cut["tokens_predicted"] < 100) == ("limit", True)
    timed = post(http, "/completion", **body, t_max_predict_ms=1)
    assert whole.startswith(timed["content"])
    assert (timed["stop_type"], "\n" in timed["content"]) == ("limit", True)
    assert len(timed["content"]) < len(whole)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_indentation_of_pieces_of_text(size: int) -> None:
    def limited(text: str, least: int) -> tuple[str, bool]:
        limiter = LineLimiter(LineLimits(min_indent=least))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        return "".join(limiter.feed(piece, 0.0) for piece in pieces), limiter.has_ended

    text = "a\n  b\n\t\tc\n d"
    assert limited(text, 0) == (text, False)
    assert limited(text, 2) == ("a\n  b\n\t\tc\n ", True)
    assert limited(text, 3) == ("a\n  ", True)
    assert limited("a\n\nb", 1) == ("a\n", True)
    assert limited("a\n   ", 4) == ("a\n   ", False)


def test_the_time_ends_an_answer_at_a_line_break() -> None:
    limiter = LineLimiter(LineLimits(time_ms=100))
    assert [limiter.feed("a\n", 50), limiter.feed("b", 150)] == ["a\n", "b"]
    assert not limiter.has_ended
    assert [limiter.feed("c\nd", 151), limiter.feed("e\n", 152)] == ["c\nd", ""]
    assert limiter.has_ended


def test_the_time_does_not_end_an_answer_that_the_model_has_ended() -> None:
    """What a possible stop string held back has a line break, and comes out after the time."""
    seq = Sequence(
        id="a",
        tokens=[*b"ax"],
        num_prompt=1,
        params=SamplingParams(stop=("\n\n",)),
        ctx=100,
        max_len=100,
        stop_ids=frozenset({0}),
        line_limits=LineLimits(time_ms=1),
    )
    seq.first_token_s = time.monotonic() - 10
    processor = OutputProcessor(seq, ByteTokenizer(256))
    delta = processor.process(SequenceOutput(seq, (*b"x\n", 0), reason="stop"))
    assert delta is not None
    assert (delta.text, processor.end_reason) == ("x\n", None)
    cut = OutputProcessor(seq, ByteTokenizer(256))
    cut.process(SequenceOutput(seq, (*b"x\ny",)))
    assert cut.end_reason == "length"
