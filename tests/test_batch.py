"""Batch jobs: validated first, in the background, resumed after any end without loss or repeats."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import ServerHarness, running_alone, server_harness, wait_until

from localgen.backends.errors import InvalidRequest, OutOfMemory, ServerUnavailable
from localgen.batch.lines import read_batch, read_body
from localgen.batch.results import ResultFile
from localgen.batch.schema import validate_body
from localgen.cli import batch_jobs
from localgen.cli.errors import INTERNAL_ERROR, exit_status
from localgen.cli.main import run_command_line
from localgen.client.responses import Reply

MANY = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def served(server: ServerHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerHarness]:
    for name, value in server.settings.to_environment().items():
        monkeypatch.setenv(name, value)
    yield from running_alone(server)


def line(custom_id: str, model: str | None, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"a {custom_id}"}]
    body = {"model": model, "messages": messages, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def run(batch: Path, out: Path, *arguments: str) -> int:
    return run_command_line(["run", "--batch", str(batch), "--out", str(out), *arguments])


def start(batch: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "localgen.cli.main", "run"]
    return subprocess.Popen(
        [*command, "--batch", str(batch), "--out", str(out)],
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_results_are_in_openais_format(
    served: ServerHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served.model()
    plain = line("plain", model)
    plain |= {"url": "/v1/completions", "body": {"model": model, "prompt": "b c"}}
    batch = write(tmp_path / "in", [line("chat", model), plain])
    assert run(batch, tmp_path / "out") == 0
    found = {each["custom_id"]: each for each in results(tmp_path / "out")}
    chat, text = found["chat"], found["plain"]
    assert set(chat) == {"id", "custom_id", "response", "error"}
    assert (chat["response"]["status_code"], chat["error"]) == (200, None)
    assert len(chat["response"]["request_id"]) == 24
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "a chat"
    assert text["response"]["body"]["choices"][0]["text"] == "b c"
    assert "2 results in" in capsys.readouterr().err


def test_an_error_of_the_server_is_a_result_and_the_rest_goes_on(
    served: ServerHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served.model()
    long = line("long", model, messages=[{"role": "user", "content": "a " * 2000}])
    batch = write(tmp_path / "in", [long, line("short", model)])
    assert run(batch, tmp_path / "out") == 1
    status = {r["custom_id"]: r["response"]["status_code"] for r in results(tmp_path / "out")}
    assert status == {"long": 400, "short": 200}
    begun, said = capsys.readouterr().err.splitlines()
    assert begun == "0/2"
    assert said.endswith("/out, 1 with an error of the server: see status_code")
    assert run(batch, tmp_path / "out") == 1  # it is not asked again
    assert num_lines(tmp_path / "out") == 2


def test_an_unknown_model_is_found_before_anything_is_computed(
    served: ServerHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served.model("unused")
    batch = write(tmp_path / "in", [line("a", model), line("b", "a/b")])
    assert run(batch, tmp_path / "out") != 0
    assert "line 2: Model 'a/b' not found" in capsys.readouterr().err
    assert served.loads(model) == 0


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_error_of_the_first_model_comes_before_those_of_a_large_file(
    served: ServerHarness,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_replaced: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfMemory("it does not fit")

    monkeypatch.setattr("localgen.client.LocalClient.load", refuse)
    monkeypatch.setattr(batch_jobs, "_LARGE_BYTES", 0)
    known, broken = served.model(), line("b", None) | {"url": "/v1/nothing"}
    for model, why in (("a/b", "Model 'a/b' not found"), (served.model("big"), "it does not fit")):
        batch = write(tmp_path / "in", [line("a", known if is_replaced else model), broken])
        assert run(batch, tmp_path / "out", *([model] if is_replaced else []))
        (said,) = capsys.readouterr().err.splitlines()
        assert why in said
        assert not (tmp_path / "out").exists()


def test_a_model_on_the_command_line_replaces_those_of_the_lines(
    served: ServerHarness, tmp_path: Path
) -> None:
    batch = write(tmp_path / "in", [line("a", "gpt-4o-mini"), line("b", None)])
    assert run(batch, tmp_path / "out", served.model()) == 0
    assert [each["response"]["status_code"] for each in results(tmp_path / "out")] == [200, 200]


def test_killed_at_random_lines_and_resumed_nothing_is_twice_or_missing(
    served: ServerHarness, tmp_path: Path
) -> None:
    model, chance = served.model("slow", token_s=0.005), random.Random(3)
    batch = write(tmp_path / "in", [line(f"line-{n}", model) for n in range(MANY)])
    out, kills = tmp_path / "out", 0
    while num_lines(out) < MANY and kills < 6:
        before = num_lines(out)
        process = start(batch, out)
        more = chance.randint(1, 12)
        wait_until(lambda: num_lines(out) >= before + more or process.poll() is not None, 60)  # noqa: B023
        process.kill()
        process.communicate()
        kills += 1
        if chance.random() < 0.5:  # killed in mid-line
            whole = out.read_bytes()
            out.write_bytes(whole[: -chance.randint(1, len(whole.splitlines()[-1]))])
    assert kills > 1
    assert run(batch, out) == 0
    assert sorted(each["custom_id"] for each in results(out)) == sorted(
        f"line-{n}" for n in range(MANY)
    )
    assert run(batch, out) == 0
    assert num_lines(out) == MANY


def test_ctrl_c_stops_and_says_how_to_resume(served: ServerHarness, tmp_path: Path) -> None:
    model = served.model("slow", token_s=0.05)
    batch = write(tmp_path / "in", [line(f"line-{n}", model) for n in range(MANY)])
    process = start(batch, tmp_path / "out")
    wait_until(lambda: num_lines(tmp_path / "out") > 0 or process.poll() is not None, 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    done = num_lines(tmp_path / "out")
    assert said.decode().splitlines() == [
        f"0/{MANY}",
        f"stopped: {done} of {MANY} are done, the same command resumes",
    ]
    # the server has given up what was running
    wait_until(lambda: served.http.get("/health").json()["active_requests"] == 0)


def test_a_dead_engine_costs_no_result(served: ServerHarness, tmp_path: Path) -> None:
    model, out = served.model("slow", token_s=0.05), tmp_path / "out"
    batch = write(tmp_path / "in", [line(f"line-{n}", model) for n in range(MANY)])
    process = start(batch, out)
    wait_until(lambda: num_lines(out) > 3, 60)
    os.kill(served.stats(model)["pid"], signal.SIGKILL)
    require_rest(process, out)
    assert served.loads(model) == 2


def test_a_dead_server_is_started_again_and_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with server_harness() as own:
        for name, value in own.settings.to_environment().items():
            monkeypatch.setenv(name, value)
        body = {"max_tokens": 40, "ignore_eos": True}
        batch = write(tmp_path / "in", [line(f"line-{n}", "tiny", **body) for n in range(MANY)])
        process = start(batch, out)  # it starts the server, too
        wait_until(lambda: num_lines(out) > 3 or process.poll() is not None, 60)
        killed = own.pid()
        os.kill(killed, signal.SIGKILL)
        require_rest(process, out)
        assert own.pid() != killed


def require_rest(process: subprocess.Popen[bytes], out: Path) -> None:
    """Require that a batch of MANY lines has not ended, and that it ends with all results."""
    assert num_lines(out) < MANY
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert {each["response"]["status_code"] for each in results(out)} == {200}
    names = sorted(each["custom_id"] for each in results(out))
    assert names == sorted(f"line-{n}" for n in range(MANY))


def test_all_lines_are_validated_before_the_first_is_computed(
    served: ServerHarness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served.model()
    good = line("a", model)
    bad: list[tuple[str, str]] = [
        ("{", "not valid JSON: Expecting property name enclosed in double quotes"),
        ("[]", "not a JSON object"),
        ("\udcff", "not valid JSON: not UTF-8 text"),
        (json.dumps(good | {"custom_id": "a\ud800"}), "not valid JSON: not UTF-8 text"),
        (json.dumps(line("g", model, user="\ud800")), "not valid JSON: not UTF-8 text"),
        (json.dumps(good | {"x": 1}), "unknown field x: fields are custom_id, method, url, body"),
        (json.dumps(good | {"custom_id": 5}), "custom_id must be a string that is not empty"),
        (json.dumps(good), "custom_id 'a' is also that of line 1"),
        (json.dumps(good | {"method": "GET"}), "method is 'GET', it must be POST"),
        (json.dumps(good | {"url": "/v1/embeddings"}), "url is '/v1/embeddings', it must be"),
        (json.dumps(good | {"body": []}), "body must be an object"),
        (json.dumps(line("b", model, stream=True)), "body.stream must not be true"),
        (json.dumps(line("c", model, messages=[])), "body: messages must not be empty"),
        (json.dumps(line("d", model, tempe=1)), "body: unknown field tempe"),
        (json.dumps(line("e", model, top_logprobs=1)), "body: top_logprobs needs logprobs: true"),
        (json.dumps({"custom_id": "f"}), "method is missing"),
    ]
    batch = tmp_path / "in"
    texts = [json.dumps(good), "", *(text for text, _ in bad)]
    batch.write_bytes("\n".join(texts).encode(errors="surrogateescape"))
    lines, problems = read_batch(batch, validate_body)
    assert [each.custom_id for each in lines] == ["a"]
    assert [each.number for each in problems] == list(range(3, 3 + len(bad)))
    for problem, (_, said) in zip(problems, bad, strict=True):
        assert problem.reason.startswith(said), problem
    assert run(batch, tmp_path / "out") == 3
    *shown, more, end = capsys.readouterr().err.splitlines()
    assert shown[0] == f"{batch}: line 3: {bad[0][1]}"
    assert (len(shown), more) == (10, "and 6 more")
    assert end == (
        f"localgen: {batch}: 16 of 17 lines are invalid, so nothing was computed: correct them"
    )
    assert served.loads(model) == 0
    assert not (tmp_path / "out").exists()


def test_what_does_not_belong_to_a_batch_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = write(tmp_path / "in", [line("a", "tiny")])
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello\n")
    write(tmp_path / "others", [{"custom_id": "z", "response": {"status_code": 200}}])
    both = ("--batch", str(batch), "--out", str(tmp_path / "out"))
    for arguments, said in (
        (("--batch", str(batch)), "--batch needs --out FILE for the results"),
        (("--out", "x"), "--out needs --batch FILE"),
        (("--concurrency", "2", "tiny", "a"), "--concurrency needs --batch FILE"),
        (("--batch", str(batch), "--out", str(batch)), "--out must not be the file of --batch"),
        (("--batch", str(tmp_path / "no"), "--out", "x"), f"--batch {tmp_path / 'no'}: No such"),
        (("--batch", str(tmp_path / "empty"), "--out", "x"), f"{tmp_path / 'empty'} has no"),
        ((*both, "--temp", "1"), "--temp does not apply to --batch: set it in the body of each"),
        ((*both, "--system", "a"), "--system does not apply to --batch: set it in the body"),
        ((*both, "--json"), "--json does not apply to --batch: leave it out"),
        ((*both, "tiny", "hello"), "a prompt does not apply to --batch: leave it out"),
        (
            ("--batch", str(batch), "--out", str(tmp_path / "text")),
            f"{tmp_path / 'text'}: line 1 is not the result of a batch: give another --out",
        ),
        (
            ("--batch", str(batch), "--out", str(tmp_path / "others")),
            f"{tmp_path / 'others'} has a result of 'z', which is not in this batch: give another",
        ),
        (("--batch", str(batch), "--out", str(tmp_path)), "Invalid value for '--out'"),
    ):
        assert run_command_line(["run", *arguments]) != 0
        (shown,) = capsys.readouterr().err.splitlines()
        assert said in shown, arguments
    assert (tmp_path / "text").read_text() == "hello\n"
    assert not (tmp_path / "out").exists()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with ResultFile.opened(tmp_path / "out", {"a"}) as first:
        with (
            pytest.raises(InvalidRequest, match="another run writes"),
            ResultFile.opened(tmp_path / "out", {"a"}),
        ):
            raise AssertionError("two runs")
        first.append("a", Reply(200, "1", {"text": "é\ud800"}))
    with ResultFile.opened(tmp_path / "out", {"a"}) as again:
        assert again.done == {"a"}


def test_a_half_written_line_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    out, known = tmp_path / "out", {"a", "b"}
    with ResultFile.opened(out, known) as results_file:
        results_file.append("a", Reply(200, "1", {}))
        first = out.stat().st_size
        results_file.append("b", Reply(500, "2", {"error": {}}))
    whole = out.read_bytes()
    for size in range(len(whole) + 1):
        out.write_bytes(whole[:size])
        with ResultFile.opened(out, known) as results_file:
            wanted = {"a", "b"} if size == len(whole) else {"a"} if size >= first else set()
            assert results_file.done == wanted
            assert out.stat().st_size == (0, first, len(whole))[len(wanted)]
            assert results_file.num_failed == ("b" in wanted)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    batch = write(tmp_path / "in", [line("a", "tiny"), line("b", "tiny")])
    lines, _ = read_batch(batch, validate_body)
    assert read_body(batch, lines[1])["model"] == "tiny"
    write(batch, [line("longer", "tiny"), line("b", "tiny")])
    with pytest.raises(InvalidRequest, match="has changed since it was validated"):
        read_body(batch, lines[1])


class Recorder:
    """A client that answers at once."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.status_of: dict[str, int] = {}  # by the content of the first message
        self.errors: dict[str, Exception] = {}
        self.reply: dict[str, Any] = {}

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def load(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(processor="100% CPU", max_seqs=2)

    def send(self, path: str, body: dict[str, Any]) -> Reply:
        self.sent.append(body)
        content = body["messages"][0]["content"]
        if content in self.errors:
            raise self.errors[content]
        status = self.status_of.get(content, 200)
        return Reply(status, "", self.reply)


def test_its_requests_run_in_the_background_and_leave_no_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(batch_jobs, "create_client", lambda *_: recorder)
    batch = write(tmp_path / "in", [line("a", "tiny"), line("b", "tiny", priority=2)])
    assert run(batch, tmp_path / "out") == 0
    sent = {each["messages"][0]["content"]: each for each in recorder.sent}
    assert [each["priority"] for _, each in sorted(sent.items())] == [-1, 2]
    assert {each["save_prefix"] for each in recorder.sent} == {False}
    monkeypatch.setenv("LOCALGEN_PRIORITY", "5")  # of prompts
    for arguments, wanted in (((), -1), (("--priority", "-7"), -7), (("--priority", "0"), 0)):
        recorder.sent.clear()
        assert run(batch, tmp_path / f"out{wanted}", *arguments) == 0
        assert sorted(each["priority"] for each in recorder.sent) == sorted([wanted, 2])


def test_a_request_that_is_refused_for_now_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(batch_jobs, "create_client", lambda *_: recorder)
    monkeypatch.setattr("localgen.batch.run._RETRY_DELAYS_S", (0.0,))
    batch, out = write(tmp_path / "in", [line("a", "tiny"), line("b", "tiny")]), tmp_path / "out"
    recorder.status_of = {"a a": 503}
    assert run(batch, out) == 1
    assert [each["custom_id"] for each in results(out)] == ["b"]
    assert "1 of 2 were refused for now: the same command asks again" in capsys.readouterr().err
    recorder.status_of.clear()
    assert run(batch, out) == 0
    assert {each["custom_id"] for each in results(out)} == {"a", "b"}


def test_a_server_that_stays_lost_ends_the_run_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(batch_jobs, "create_client", lambda *_: recorder)
    monkeypatch.setattr("localgen.batch.run._RETRY_DELAYS_S", (0.0,))
    batch, out = write(tmp_path / "in", [line("a", "tiny"), line("b", "tiny")]), tmp_path / "out"
    lost = ServerUnavailable("no server")
    recorder.errors = {"a b": lost}
    assert run(batch, out, "--concurrency", "1") == exit_status(lost.code)
    assert capsys.readouterr().err == "0/2\nlocalgen: no server\n"
    assert len(recorder.sent) == 1 + 2
    assert [each["custom_id"] for each in results(out)] == ["a"]
    recorder.errors.clear()
    assert run(batch, out) == 0
    assert [each["custom_id"] for each in results(out)] == ["a", "b"]


def test_a_defect_ends_the_run_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    recorder = Recorder()
    monkeypatch.setattr(batch_jobs, "create_client", lambda *_: recorder)
    recorder.errors = {"a b": ZeroDivisionError("a defect")}
    batch, out = write(tmp_path / "in", [line(name, "tiny") for name in "abc"]), tmp_path / "out"
    assert run(batch, out, "--concurrency", "1") == INTERNAL_ERROR
    _begun, said = capsys.readouterr().err.splitlines()
    assert said.startswith("localgen: internal error (ZeroDivisionError: a defect)")
    assert [each["custom_id"] for each in results(out)] == ["a"]


@pytest.mark.parametrize("usage", ["n/a", 5, {"completion_tokens": "many"}])
def test_an_answer_that_cannot_be_counted_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: object
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(batch_jobs, "create_client", lambda *_: recorder)
    recorder.reply = {"usage": usage}
    batch = write(tmp_path / "in", [line(name, "tiny") for name in "abcd"])
    assert run(batch, tmp_path / "out") == 0
    found = results(tmp_path / "out")
    assert sorted(each["custom_id"] for each in found) == list("abcd")
    assert [each["response"]["body"] for each in found] == [{"usage": usage}] * 4


@pytest.mark.parametrize(
    "text",
    [
        "notes, without a newline at the end",
        " ",
        '{"id": "of another program"',
        # a result could not be appended to this line
        '{"custom_id": "a", "response": {"status_code": 200}}',
    ],
)
def test_text_that_is_not_ours_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    batch, out = write(tmp_path / "in", [line("a", "tiny")]), tmp_path / "notes"
    ours = '{"custom_id": "a", "response": {"status_code": 200}}\n'
    for number, before in enumerate(("", ours), 1):
        out.write_text(before + text)
        assert run(batch, out) == 3
        said = f"line {number} is not the result of a batch: give another --out"
        assert said in capsys.readouterr().err
        assert out.read_text() == before + text
