"""/v1/stats: machine, ended requests and memory bandwidth; cancelling by id."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import top_script
from models import TINY_GGUF
from scripted_client import model_info
from serving import MANY_WORDS, ServerHarness, chat_body, in_thread, server_harness, wait_until
from tcp_server import AUTH, KEY, code, tcp_server

from localgen.backends.formats.model_files import ModelFile
from localgen.backends.machine_stats import EndedRequest, MachineStats, ReadCost
from localgen.backends.model_info import LoadOptions
from localgen.backends.prefix_break import PrefixBreak
from localgen.backends.types import Finished, RestoredTokens, Timings
from localgen.client.snapshot import ServerSnapshot
from localgen.machine import bandwidth, gpus, measurements
from localgen.machine.bandwidth import Bandwidth
from localgen.machine.gpus import Gpu, read_gpu_metrics
from localgen.server.models.resident import ResidentModel
from localgen.server.stats import memory_reads
from localgen.server.stats.machine_watch import MAX_AGE_S, MachineWatch
from localgen.server.stats.memory_reads import ReadCostCache, compute_read_cost
from localgen.server.stats.recent_requests import MAX_RECENT_REQUESTS, RecentRequests
from localgen.server.stats.request_log import RequestRecord
from localgen.tui.top.request_rows import RequestRow, request_rows
from localgen.tui.top.timeline import timeline_lines


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


class Answer:
    """A streaming answer, read in a thread."""

    def __init__(self, served: ServerHarness, model: str, **fields: Any) -> None:
        self.id, self.text, self.reason, self.error = "", "", "", ""
        self._served, self._model, self._fields = served, model, fields
        self.thread = in_thread(self._read)
        wait_until(lambda: self.id)

    def _read(self) -> None:
        body = chat_body(self._model, MANY_WORDS, stream=True, **self._fields)
        with self._served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            self.id = reply.headers["x-request-id"]
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.error = self.error or event.get("error", {}).get("code", "")
                for choice in event.get("choices", ()):
                    self.text += choice["delta"].get("content") or ""
                    self.reason = choice["finish_reason"] or self.reason


def cancel(served: ServerHarness, request_id: str) -> bool:
    reply = served.http.post(f"/v1/requests/{request_id}/cancel")
    assert reply.status_code == 200, reply.text
    return bool(reply.json()["cancelled"])


def ended(served: ServerHarness) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.http.get("/v1/stats").json()["ended"]
    return found


def test_a_request_is_cancelled_by_its_id(served: ServerHarness) -> None:
    model = served.model("slow", token_s=0.02)
    answer = Answer(served, model)
    wait_until(lambda: len(answer.text) > 3)
    assert not cancel(served, "nobody")
    assert cancel(served, answer.id)
    answer.thread.join(10)
    assert answer.reason == "cancelled"
    assert answer.error == ""
    assert answer.text.startswith("0 1 2"), "what was written so far has reached the client"
    assert not cancel(served, answer.id), "it has ended"
    wait_until(lambda: ended(served)[:1] and ended(served)[0]["request_id"] == answer.id)
    last = ended(served)[0]
    assert (last["outcome"], last["model"]) == ("cancelled", "slow")
    assert served.stats(model)["active_requests"] == 0


def test_others_go_on_when_one_is_cancelled(served: ServerHarness) -> None:
    model = served.model("pair", token_s=0.005)
    first, second = Answer(served, model), Answer(served, model, max_tokens=40)
    assert cancel(served, first.id)
    first.thread.join(20)
    second.thread.join(20)
    assert (first.reason, second.reason) == ("cancelled", "length")


def test_the_reasoning_of_all_choices_is_ended_by_the_id_of_the_request(
    served: ServerHarness,
) -> None:
    model = served.model("thinking", token_s=0.02)
    answer = Answer(served, model, n=2)
    wait_until(lambda: len(answer.text) > 3)
    path = f"/v1/requests/{answer.id}/answer-now"
    assert served.http.post("/v1/requests/nobody/answer-now").json() == {"answering": False}
    assert served.http.post(path).json() == {"answering": True}
    answer.thread.join(10)
    assert answer.reason == "stop"
    assert answer.text.count("now") == 2
    assert served.http.post(path).json() == {"answering": False}, "it has ended"


def test_cancelling_over_tcp_needs_a_key() -> None:
    with tcp_server(keys=[KEY]) as opened:
        path = "/v1/requests/nobody/cancel"
        assert code(opened.http.post(path)) == "invalid_api_key"
        assert opened.http.post(path, headers=AUTH).json() == {"cancelled": False}
        assert opened.http.get(path, headers=AUTH).status_code == 405
        path = "/v1/requests/nobody/answer-now"
        assert code(opened.http.post(path)) == "invalid_api_key"
        assert opened.http.post(path, headers=AUTH).json() == {"answering": False}


@pytest.mark.parametrize("path", ["//cancel", "/%2e%2e/cancel", "/a/b/cancel", "/%00/cancel"])
def test_invalid_ids_cancel_nothing(served: ServerHarness, path: str) -> None:
    reply = served.http.post(f"/v1/requests{path}")
    assert reply.status_code in (200, 404)
    assert "true" not in reply.text


def entry(**fields: Any) -> RequestRecord:
    made = RequestRecord(
        id="r1", requested_model="tiny", client="c", account="", arrived_s=0.0, **fields
    )
    made.ended_s = time.monotonic()
    return made


def finish(request_id: str = "r1", **fields: Any) -> Finished:
    timings = Timings(
        cache_n=12, prompt_n=34, prompt_ms=100.0, cached_ms=5.0, first_step_ms=20.0,
        predicted_ms=400.0, predicted_per_second=50.0, ttft_ms=130.0, queue_ms=20.0,
        template_ms=10.0, draft_n=8, draft_n_accepted=4,
    )  # fmt: skip
    known: dict[str, Any] = {"reason": "stop", "prompt_tokens": 46, "completion_tokens": 21}
    return Finished(request_id=request_id, timings=timings, ctx=2048, **(known | fields))


def test_an_ended_request_says_where_its_time_went() -> None:
    recent = RecentRequests()
    recent.on_request_end(entry(model="llama", outcome="stop", total=finish(), finished=[finish()]))
    (found,) = recent.requests()
    assert (found.model, found.outcome, found.generated_tokens) == ("llama", "stop", 21)
    phases = found.phases
    assert (phases.template_ms, phases.queue_ms, phases.cached_ms) == (10, 20, 5)
    assert (phases.prefill_ms, phases.first_step_ms, phases.decode_ms) == (75, 20, 400)
    assert 0 <= found.ended_ago_s < 5


def test_only_local_clients_see_excerpts_of_prompts() -> None:
    parted = PrefixBreak(
        place="the system message", byte=4, before="a", after="b", token=9, tokens=300, ms=500.0
    )
    end = finish()
    end = replace(end, timings=replace(end.timings, prefix_break=parted))
    recent = RecentRequests()
    recent.on_request_end(entry(finished=[end], total=end))
    assert [each.prefix_break for each in recent.requests(with_prompts=True)] == [str(parted)]
    assert [each.prefix_break for each in recent.requests()] == [""]


def test_the_timeline_says_where_a_prompt_parts() -> None:
    said = "parts at byte 4 of the system message: `a` became `b`; 300 tokens read again, 500 ms"
    ended = EndedRequest(
        request_id="r", model="m", client="c", outcome="stop", ended_ago_s=1.0, prefix_break=said
    )
    snapshot = ServerSnapshot(server_type="localgen", finished_requests=(ended,))
    rows = request_rows(snapshot, include_ended=True)
    assert rows
    row = rows[0]
    lines = [line.plain for line in timeline_lines(row, 60)]
    begin = next(number for number, line in enumerate(lines) if line.startswith("prefix "))
    assert all(len(line) <= 60 for line in lines[begin:])
    assert " ".join(line[15:] for line in lines[begin:]) == said
    assert not any(
        line.plain.startswith("prefix")
        for line in timeline_lines(replace(row, prefix_break=""), 60)
    )


def test_the_timeline_of_an_ended_request_says_what_came_from_other_tiers() -> None:
    restored = (RestoredTokens("ram", 512, 8.5, 700.0), RestoredTokens("disk", 4096, 210.0, 54e3))
    end = finish()
    end = replace(end, timings=replace(end.timings, restored=restored))
    recent = RecentRequests()
    recent.on_request_end(entry(finished=[end], total=end))
    recent.on_request_end(entry(finished=[finish("r2")], total=finish("r2")))
    snapshot = ServerSnapshot(server_type="localgen", finished_requests=tuple(recent.requests()))
    plain, kept = request_rows(snapshot, include_ended=True) or []
    assert _restored_lines(kept, 110) == [str(restored[0]) + ", " + str(restored[1])]
    narrow = _restored_lines(kept, 68)
    assert " ".join(narrow) == str(restored[0]) + ", " + str(restored[1])
    assert len(narrow) == 2
    assert not any(line.plain.startswith("restored") for line in timeline_lines(plain, 68))


def test_the_timeline_of_a_running_request_says_what_came_from_other_tiers() -> None:
    live = top_script.request(1, restored="4,096 tokens from disk in 0.2 s\x1b")
    snapshot = top_script.snapshot(top_script.model(sequences=(live,)), finished_requests=())
    (row,) = request_rows(snapshot, include_ended=True) or []
    assert _restored_lines(row, 68) == [r"4,096 tokens from disk in 0.2 s\x1b"]


def _restored_lines(row: RequestRow, width: int) -> list[str]:
    """The last lines of a timeline, from `restored` on."""
    lines = [line.plain for line in timeline_lines(row, width)]
    begin = next(number for number, line in enumerate(lines) if line.startswith("restored "))
    return [line[15:] for line in lines[begin:]]


def test_each_of_several_answers_is_listed_and_the_newest_come_first() -> None:
    recent = RecentRequests()
    recent.on_request_end(entry(outcome="gone", num_tokens=3))
    recent.on_request_end(entry(finished=[finish("a"), finish("b")], total=finish("a")))
    assert [each.request_id for each in recent.requests()] == ["b", "a", "r1"]
    gone = recent.requests()[-1]
    assert (gone.model, gone.outcome, gone.generated_tokens, gone.ttft_ms) == (
        "tiny",
        "gone",
        3,
        None,
    )


def test_a_request_whose_client_has_gone_has_its_figures(served: ServerHarness) -> None:
    model = served.model("left alone", token_s=0.02)
    events = served.events(model, MANY_WORDS)
    for _ in range(5):
        next(events)
    events.close()

    wait_until(lambda: "left alone" in [each["model"] for each in ended(served)])
    found = ended(served)[0]
    assert found["outcome"] == "gone"
    assert found["prompt_tokens"] > 0
    assert found["generated_tokens"] >= 3
    assert found["ttft_ms"] > 0
    assert found["ctx"] > 0


def test_only_the_last_requests_are_kept() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT_REQUESTS + 20):
        recent.on_request_end(entry(finished=[finish(str(number))], total=finish()))
    assert len(recent.requests()) == MAX_RECENT_REQUESTS
    assert recent.requests()[0].request_id == str(MAX_RECENT_REQUESTS + 19)


def test_the_machine_is_asked_in_a_thread_and_once_a_second() -> None:
    asked, may_answer = [], threading.Event()

    def look() -> MachineStats:
        asked.append(threading.current_thread().name)
        may_answer.wait(10)
        return MachineStats(cpu=0.5)

    watch = MachineWatch(look)
    assert [watch.latest for _ in range(50)] == [None] * 50, "nobody waits for it"
    may_answer.set()
    wait_until(lambda: watch.latest == MachineStats(cpu=0.5))
    assert asked == ["machine"]
    watch._probed_s -= MAX_AGE_S
    wait_until(lambda: watch.latest is not None and len(asked) == 2)


TINY = ModelFile("tiny", TINY_GGUF, TINY_GGUF.stat().st_size, (TINY_GGUF,), "built-in")


def known(monkeypatch: pytest.MonkeyPatch, ram: float | None, gpu: float | None = None) -> None:
    def found(rate: float | None) -> Bandwidth | None:
        return None if rate is None else Bandwidth(rate, "measured before")

    monkeypatch.setattr(memory_reads, "cached_memory_bandwidth", lambda: found(ram))
    monkeypatch.setattr(memory_reads, "cached_gpu_bandwidth", lambda gpu_: found(gpu))


def test_bytes_read_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, 2e10)
    cost = compute_read_cost(TINY, model_info(ctx=2048), ())
    assert cost is not None
    # a step reads single rows of the embedding, which is not tied to the head
    assert 0.7 * TINY.size_bytes < cost.weights_bytes < TINY.size_bytes
    assert cost.kv_token_bytes > 0
    assert (cost.medium, cost.bytes_per_s, cost.how) == ("RAM", 2e10, "measured before")
    halved = compute_read_cost(TINY, model_info(options=LoadOptions(cache_type_k="q8_0")), ())
    assert halved is not None
    assert halved.kv_token_bytes < cost.kv_token_bytes


def test_two_gpus_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, None, 1e12)
    two = tuple(Gpu(index, "H200", 1, 1, (9, 0)) for index in range(2))
    cost = compute_read_cost(TINY, model_info(processor="100% GPU"), two)
    assert cost is not None
    assert (cost.medium, cost.bytes_per_s) == ("GPU 0 + GPU 1", 2e12)


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ("100% CPU", "run localgen plan"),
        ("48%/52% CPU/GPU", "no single limit"),
        ("100% GPU", "driver"),
    ],
)
def test_a_limit_that_is_not_known_is_none(
    monkeypatch: pytest.MonkeyPatch, processor: str, says: str
) -> None:
    known(monkeypatch, None)
    monkeypatch.setattr(memory_reads, "nvidia_gpus", lambda: ())
    cost = compute_read_cost(TINY, model_info(processor=processor), ())
    assert cost is not None
    assert cost.bytes_per_s is None
    assert says in cost.how


def test_unreadable_file_has_no_read_cost(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    assert compute_read_cost(ModelFile("b", path, 4, (path,), "file"), model_info(), ()) is None


def test_model_without_a_read_cost_keeps_its_other_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(memory_reads, "read_model_shape", fail)
    assert compute_read_cost(TINY, model_info(), ()) is None


def test_costs_are_found_once_and_again_only_while_the_limit_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    limits: list[float | None] = [None, 5.0, 5.0]

    def found(file: ModelFile, info: object, gpus_: object) -> ReadCost:
        asked.append(file.name)
        limit = limits[len(asked) - 1]
        return ReadCost(weights_bytes=1, kv_token_bytes=1, medium="RAM", bytes_per_s=limit, how="")

    monkeypatch.setattr(memory_reads, "compute_read_cost", found)
    resident = cast(ResidentModel, SimpleNamespace(
        info=model_info(), id="x", file=TINY, placement=SimpleNamespace(gpus=())
    ))  # fmt: skip
    costs = ReadCostCache()
    assert costs.lookup(resident) is None, "nobody waits for it"
    wait_until(lambda: costs.lookup(resident) is not None)

    def limit() -> float | None:
        cost = costs.lookup(resident)
        return cost.bytes_per_s if cost else None

    wait_until(lambda: limit() == 5.0)
    for _ in range(200):
        costs.lookup(resident)
    assert len(asked) == 2
    assert costs.lookup(cast(ResidentModel, SimpleNamespace(info=None, id="y"))) is None


def test_a_known_bandwidth_is_read_and_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> float:
        raise AssertionError("it was measured")

    monkeypatch.setattr(bandwidth, "measure_ram_bandwidth", measure)
    monkeypatch.setattr(measurements, "measurements_path", lambda: tmp_path / "measured.json")
    assert bandwidth.cached_memory_bandwidth() is None
    key = measurements._key("memory bandwidth 1")
    (tmp_path / "measured.json").write_text(json.dumps({key: 3e10}))
    assert bandwidth.cached_memory_bandwidth() == Bandwidth(3e10, "measured before")
    gpu = Gpu(0, "H200", 1, 1, (9, 0), bandwidth_bytes_per_s=4e12)
    assert bandwidth.cached_gpu_bandwidth(gpu) == Bandwidth(4e12, "reported by the driver")
    assert bandwidth.cached_gpu_bandwidth(Gpu(0, "MIG", 1, 1, (9, 0))) is None


class FakeNvml:
    """NVIDIA's library with one GPU. silent: values that this GPU does not report."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    NVML_CLOCK_MEM = 1

    def __init__(self, *silent: str) -> None:
        self.silent = silent
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150, used=90, free=60),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 512_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEnergyConsumption": 2_500,
        }

        def ask(*asked: Any) -> Any:
            if name in self.silent:
                raise self.NVMLError(name)
            if name == "nvmlDeviceGetClockInfo":
                return (1980, 3201)[asked[1]]
            return answers[name]

        return ask


def test_gpu_metrics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", cast(Any, nvml))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = read_gpu_metrics()
    assert (gpu.name, gpu.total_bytes, gpu.used_bytes) == ("NVIDIA H200", 150, 90)
    assert (gpu.busy, gpu.power_w, gpu.power_limit_w) == (0.97, 512.0, 700.0)
    assert (gpu.temperature_c, gpu.clock_mhz, gpu.memory_clock_mhz) == (61, 1980, 3201)
    assert gpus.gpu_energy_joules() == 2.5
    assert nvml.open == 0


def test_missing_gpu_metrics_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = (
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
    )
    monkeypatch.setitem(sys.modules, "pynvml", cast(Any, FakeNvml(*silent)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = read_gpu_metrics()
    assert (gpu.busy, gpu.power_w, gpu.temperature_c) == (None, None, None)
    assert gpu.power_limit_w == 700.0
    broken = FakeNvml("nvmlDeviceGetCount")
    monkeypatch.setitem(sys.modules, "pynvml", cast(Any, broken))
    assert gpus.read_gpu_metrics() == ()
    assert gpus.gpu_energy_joules() is None
    assert broken.open == 0


def test_a_key_ends_only_its_own_requests() -> None:
    other = {"x-api-key": "another-key-of-some-length"}
    with tcp_server(keys=[KEY, other["x-api-key"]]) as opened:
        harness = opened.harness
        model = harness.named("slow", token_s=0.02)
        for headers, what, ending in (
            (AUTH, "cancel", "cancelled"),
            (AUTH, "answer-now", "answering"),
            ({}, "cancel", "cancelled"),
        ):
            body = chat_body(model, MANY_WORDS, stream=True)
            with opened.http.stream(
                "POST", "/v1/chat/completions", json=body, headers=AUTH
            ) as reply:
                path = f"/v1/requests/{reply.headers['x-request-id']}/{what}"
                assert opened.http.post(path, headers=other).json() == {ending: False}
                owner = opened.http if headers else harness.http  # else over the Unix socket
                assert owner.post(path, headers=headers).json() == {ending: True}
                reason = "stop" if what == "answer-now" else "cancelled"
                assert f'"finish_reason":"{reason}"' in reply.read().decode()
