"""Several answers to one request, over a real socket."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from serving import ServerHarness, server_harness, wait_until

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Finished, Request, RestoredTokens, Timings
from localgen.server.openai.schema import MAX_CHOICES
from localgen.server.requests.choices import fan_out_requests, merge_finished


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def completion(served: ServerHarness, prompt: object, **fields: Any) -> Any:
    body = {"model": served.model(), "prompt": prompt, **fields}
    return served.http.post("/v1/completions", json=body)


def test_a_whole_chat_with_several_answers(served: ServerHarness) -> None:
    answer = served.chat(served.model(), "a b c", n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"a b c"}
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("n", [1, 2, 16])
def test_a_streamed_chat_with_several_answers(served: ServerHarness, n: int) -> None:
    options = {"include_usage": True}
    *events, done = served.events(served.model(), "a b c", n=n, stream_options=options)
    assert done == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5
    assert usage["usage"]["completion_tokens"] == 3 * n
    deltas: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        (choice,) = event["choices"]
        deltas[choice["index"]].append(choice)
    assert sorted(deltas) == list(range(n))
    for choices in deltas.values():
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in choices) == "a b c"
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]


def test_each_answer_has_a_seed_of_its_own(served: ServerHarness) -> None:
    events = list(served.events(served.model(), "a", n=3, seed=7))[:-1]
    ends = {e["choices"][0]["index"]: e["localgen"]["seed"] for e in events if "timings" in e}
    assert ends == {0: 7, 1: 8, 2: 9}


def test_seeds_stay_in_range_and_no_seed_stays_none() -> None:
    seeded = Request(id="x", prompt="a", params=SamplingParams(seed=2**32 - 1))
    assert [r.params.seed for r in fan_out_requests([seeded], 2)] == [2**32 - 1, 0]
    assert [r.params.seed for r in fan_out_requests([Request(id="x", prompt="a")], 2)] == [
        None,
        None,
    ]
    assert fan_out_requests([seeded], 1) == (seeded,)


def test_several_prompts(served: ServerHarness) -> None:
    answer = completion(served, ["a b", "c"], n=2).json()
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {0: "a b", 1: "a b", 2: "c", 3: "c"}
    # two words and one, and two tokens that the engine adds to each
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 6


def test_several_prompts_in_a_stream(served: ServerHarness) -> None:
    text = completion(served, ["a b", "c"], stream=True, logprobs=1).text
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    texts: dict[int, str] = defaultdict(str)
    offsets: dict[int, list[int]] = defaultdict(list)
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += (choice["logprobs"] or {}).get("text_offset", [])
    assert texts == {0: "a b", 1: "c"}
    assert offsets == {0: [0, 1], 1: [0]}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (["a"] * (MAX_CHOICES // 2 + 1), "limit of 64"),
        ([[1], [-1]], "out of range"),
        ([1, "a"], "prompt: "),
    ],
)
def test_prompts_that_are_refused(served: ServerHarness, prompt: object, says: str) -> None:
    reply = completion(served, prompt, n=2)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_answer_ends_all(stream: bool) -> None:
    with server_harness() as built:
        built.start()
        model = built.model(max_queue=2, token_s=0.02)
        reply = built.chat(model, "word " * 50, n=3, stream=stream)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "queue_full"
        assert built.chat(model, "a").status_code == 200
        assert built.stats(model)["stats"]["requests_total"]["cancelled"] == 2
        assert built.stats(model)["active_requests"] == 0


def test_disconnect_cancels_all_answers(served: ServerHarness) -> None:
    # a name of its own: a loaded model would not become slower
    model = served.model("slow", token_s=0.05)
    events = served.events(model, "word " * 100, n=4)
    next(events)
    events.close()
    wait_until(
        lambda: served.stats(model)["stats"]["requests_total"]["cancelled"] == 4,
    )


def test_request_is_logged_in_one_line() -> None:
    with server_harness() as built:
        built.start()
        built.chat(built.model(), "a b", n=3)
        log = built.settings.log_path
        wait_until(lambda: " request id=" in log.read_text())
        (line,) = [line for line in log.read_text().splitlines() if " request id=" in line]
        assert re.search(r"outcome=stop.* answer_tokens=6 ", line)
        figures = built.http.get("/metrics").text
        assert 'request_success_total{finished_reason="stop",model_name="echo"} 1.0' in figures
        assert 'localgen:prompt_tokens_total{model_name="echo"} 4.0' in figures
        assert 'localgen:generation_tokens_total{model_name="echo"} 6.0' in figures


def end(**fields: Any) -> Finished:
    known: dict[str, Any] = {"request_id": "r", "reason": "stop", "timings": Timings()}
    counts = {"prompt_tokens": 10, "completion_tokens": 4, "ctx": 100}
    return Finished(**(known | counts | fields))


def test_statistics_of_answers_are_merged() -> None:
    total = merge_finished(
        [
            end(timings=Timings(cache_n=0, prompt_n=10, predicted_ms=50, ttft_ms=9), notes=("a",)),
            end(timings=Timings(cache_n=9, prompt_n=1, predicted_ms=80, ttft_ms=7), notes=("a",)),
            end(timings=Timings(cache_n=5), prompt_tokens=6, reason="length", notes=("b",)),
            end(timings=Timings(cache_n=4), prompt_tokens=6, completion_tokens=1),
        ],
        2,
    )
    assert (total.prompt_tokens, total.completion_tokens, total.reason) == (16, 13, "length")
    assert (total.timings.cache_n, total.timings.prompt_n) == (4, 11)
    assert (total.timings.predicted_ms, total.timings.ttft_ms) == (80, 0)
    assert total.notes == ("a", "b")


def test_what_each_prompt_restored_is_summed_by_tier() -> None:
    disk, more = RestoredTokens("disk", 512, 20.0, 900.0), RestoredTokens("disk", 128, 5.0, 300.0)
    ram = RestoredTokens("ram", 256, 1.0, 400.0)
    restored = [(disk,), (), (ram, more), ()]
    total = merge_finished([end(timings=Timings(restored=each)) for each in restored], 2)
    assert set(total.timings.restored) == {ram, RestoredTokens("disk", 640, 25.0, 1200.0)}
