"""benchmarks.fuzz: inputs are repeatable, a run goes on, and findings are kept."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # for tensors of model files

from benchmarks import fuzz
from benchmarks.fuzz_parts import worker
from benchmarks.fuzz_parts.http_target import HttpTarget
from benchmarks.fuzz_parts.mutations import Mutator
from benchmarks.fuzz_parts.targets import TARGETS
from benchmarks.fuzz_parts.worker import Outcome, Worker
from localgen.backends.errors import InvalidRequest

MAKERS = {**{name: target.make for name, target in TARGETS.items()}, "http": HttpTarget().make}


class Odd:
    """A target that does what its input says."""

    name, suffix = "odd", ".txt"

    def make(self, source: random.Random) -> bytes:
        return source.randbytes(1)

    def use(self, content: bytes, folder: Path) -> None:
        if content == b"refuse":
            raise InvalidRequest("no")
        raise {b"key": KeyError, b"memory": MemoryError, b"panic": BaseException}[content]


@pytest.mark.parametrize("name", MAKERS)
def test_input_is_repeatable(name: str) -> None:
    made = [MAKERS[name](random.Random(number)) for number in range(20)]
    assert made == [MAKERS[name](random.Random(number)) for number in range(20)]
    assert len(set(made)) > 10


def test_any_json_can_be_changed() -> None:
    for number in range(50):
        mutator = Mutator(random.Random(number))
        value = {"a": [10**400, float("inf"), -0.5, {}, "", None, True], "b": {"c": [[]]}}
        for _ in range(3):
            value = mutator.json(value) or {"a": 1}
        mutator.json_text(value if isinstance(value, dict | list) else [value])


def test_only_our_errors_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "odd", Odd())
    kinds = {said: worker.judge("odd", said).kind for said in (b"refuse", b"key", b"memory")}
    assert kinds == {b"refuse": "refused", b"key": "exception", b"memory": "memory"}
    assert worker.judge("odd", b"panic").where.startswith("BaseException in ")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash"),
        ("[None for _ in iter(int, 1)]", "hang"),
    ],
)
def test_a_worker_that_crashes_or_hangs_is_a_finding_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, kind: str
) -> None:
    monkeypatch.setattr(worker, "MAX_CPU_S", 1.0)
    script = tmp_path / "odd.py"
    script.write_text(
        "import os, signal, sys\n"
        "for line in sys.stdin:\n"
        f"    if 'odd' in line: {code}\n"
        '    print(\'{"kind": "accepted"}\', flush=True)\n'
    )
    monkeypatch.setattr(worker, "python_command", lambda module: [sys.executable, str(script)])
    with Worker() as runs:
        assert runs.run("odd", b"").kind == kind
        assert runs.run("even", b"") == Outcome("accepted")


def test_a_run_goes_on_and_keeps_the_smallest_of_a_finding(tmp_path: Path) -> None:
    state = fuzz.State.load(tmp_path, 3)
    for content in (b"long enough", b"short", b"middling"):
        number = state.counts("schema")["next"]
        state.counts("schema")["next"] += 1
        fuzz.keep(state, "schema", number, content, Outcome("hang", "somewhere", "a stack"))
    state.save()
    again = fuzz.State.load(tmp_path, 3)
    assert again.counts("schema")["next"] == 3
    ((file, finding),) = again.findings.items()
    assert (tmp_path / file).read_bytes() == b"short"
    assert (finding["times"], finding["number"]) == (3, 1)
    assert finding["repeat"].endswith(f"--replay {file}")
    assert fuzz.State.load(tmp_path, 4).counts("schema")["next"] == 0


def test_the_command_runs_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--minutes", "0.001", "--targets", "config,state", "--corpus", str(tmp_path)]
    numbers = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            fuzz.main(arguments)
        targets = json.loads((tmp_path / "state-0.json").read_text())["targets"]
        numbers.append(targets["config"]["next"])
        assert targets.keys() == {"config", "state"}
    assert 0 < numbers[0] < numbers[1]
    assert "config" in capsys.readouterr().out
