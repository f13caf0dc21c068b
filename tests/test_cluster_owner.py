"""The owner of a cluster: signals whenever they come, and heads that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from localgen.cluster.owner import Owner

# a head that is ready at once, and lives until a signal
HEAD = "import time; print('ready', flush=True); time.sleep(600)"


class ScriptedOwner(Owner):
    """Starts scripts instead of heads."""

    def __init__(self, *scripts: str) -> None:
        super().__init__("")
        self.scripts = list(scripts)
        self.signals_before_start = 0

    def _start(self) -> subprocess.Popen[bytes]:
        if self.signals_before_start:
            self.signals_before_start -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        command = [sys.executable, "-c", self.scripts.pop(0)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture(autouse=True)
def signals() -> object:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_head_that_is_killed_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    killed = "import os; print('ready', flush=True); os.kill(os.getpid(), 9)"
    owner = ScriptedOwner(killed, killed, "print('ready')")
    assert owner.run() == 0
    assert owner.scripts == []
    assert capfd.readouterr().out == "ready\n", "said once"


def test_a_head_that_does_not_start_is_not_started_again() -> None:
    owner = ScriptedOwner("raise SystemExit(3)", HEAD)
    assert owner.run() == 3
    assert owner.scripts == [HEAD]


def test_a_signal_before_there_is_a_head_ends_it() -> None:
    owner = ScriptedOwner(HEAD)
    owner.signals_before_start = 1
    assert owner.run() == -signal.SIGTERM


def test_what_a_head_leaves_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    leaves = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(600)'], start_new_session=True); open({str(left)!r}, 'w')"
        ".write(str(child.pid)); print('ready')"
    )
    script = "\n".join(
        (
            "import sys",
            f"sys.path[:0] = [{str(Path(__file__).parent)!r}]",
            "from test_cluster_owner import ScriptedOwner",
            "from localgen.cluster import owner",
            "owner._adopt_orphans()",
            f"sys.exit(ScriptedOwner({leaves!r}).run())",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 0
    if sys.platform == "linux":
        assert not Path(f"/proc/{left.read_text()}").exists()
