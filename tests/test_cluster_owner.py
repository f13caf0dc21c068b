"""The owner of a cluster: signals whenever they come, and heads that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from localgen.cluster.owner import Owner

# heads wait until they are told to start
WAITS = "import os, sys, time; sys.stdin.readline() == 'start\\n' or sys.exit(9); "
READY = WAITS + "print('ready', flush=True); "
LIVES, ENDS, KILLED = READY + "time.sleep(600)", READY, READY + "os.kill(os.getpid(), 9)"


class ScriptedOwner(Owner):
    """Starts scripts instead of heads; after the last one, heads that only wait."""

    def __init__(self, *scripts: str) -> None:
        super().__init__("")
        self.scripts = list(scripts)
        self.opened: list[subprocess.Popen[bytes]] = []
        self.signals_before_start = 0

    def _open(self) -> subprocess.Popen[bytes]:
        if self.signals_before_start:
            self.signals_before_start -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        command = [sys.executable, "-c", self.scripts.pop(0) if self.scripts else WAITS]
        head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.opened.append(head)
        return head


@pytest.fixture(autouse=True)
def signals() -> object:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_head_that_is_killed_is_replaced_by_one_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    owner = ScriptedOwner(KILLED, KILLED, ENDS)
    assert owner.run() == 0
    assert capfd.readouterr().out == "ready\n", "said once"
    assert len(owner.opened) == 4, "one waits while the third runs"
    assert not psutil.pid_exists(owner.opened[3].pid)


def test_one_that_waits_may_be_killed_too() -> None:
    slow = READY + "time.sleep(1); os.kill(os.getpid(), 9)"
    owner = ScriptedOwner(slow, "import os; os.kill(os.getpid(), 9)", ENDS)
    assert owner.run() == 0
    assert owner.opened[1].returncode == -signal.SIGKILL


def test_a_head_that_does_not_start_is_not_started_again() -> None:
    owner = ScriptedOwner(WAITS + "raise SystemExit(3)")
    assert owner.run() == 3
    assert len(owner.opened) == 1


def test_a_head_that_dies_while_it_starts_anew_is_replaced_too() -> None:
    dies = WAITS + "os.kill(os.getpid(), 9)"
    assert ScriptedOwner(KILLED, dies, dies, ENDS).run() == 0
    owner = ScriptedOwner(KILLED, *[dies] * 9)
    assert owner.run() == -signal.SIGKILL
    assert len(owner.opened) == 4, "it is not tried for ever"


def test_a_signal_before_there_is_a_head_ends_it() -> None:
    owner = ScriptedOwner(LIVES)
    owner.signals_before_start = 1
    assert owner.run() == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="others do not adopt orphans")
def test_orphans_that_end_are_reaped_while_a_head_runs(tmp_path: Path) -> None:
    pid, alive = tmp_path / "pid", tmp_path / "alive"
    orphan = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(0.3)"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    look = f"os.path.exists('/proc/' + open({str(pid)!r}).read())"
    head = READY + (
        f"import subprocess; subprocess.run([sys.executable, '-c', {leaves!r}]); time.sleep(2); "
        f"open({str(alive)!r}, 'w').write(str({look}))"
    )
    assert run_apart(head) == 0
    assert alive.read_text() == "False"


def test_what_a_head_leaves_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    leaves = READY + (
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(600)'], start_new_session=True); open({str(left)!r}, 'w')"
        ".write(str(child.pid))"
    )
    assert run_apart(leaves) == 0
    if sys.platform == "linux":
        assert not Path(f"/proc/{left.read_text()}").exists()


def run_apart(head: str) -> int:
    """The exit status of an owner of this head, in a process of its own that adopts orphans."""
    script = "\n".join(
        (
            "import sys",
            f"sys.path[:0] = [{str(Path(__file__).parent)!r}]",
            "from test_cluster_owner import ScriptedOwner",
            "from localgen.cluster import owner",
            "owner._adopt_orphans()",
            f"sys.exit(ScriptedOwner({head!r}).run())",
        )
    )
    return subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode
