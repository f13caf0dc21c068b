"""Logs that several processes append to at once: no record is lost or torn."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import settings_in

from localgen.backends.errors import ServerUnavailable
from localgen.client.launch import LaunchedServer
from localgen.machine.python_process import python_environment
from localgen.server.log_file import LogFile

WRITER = """
import random, sys
from pathlib import Path
from localgen.server.log_file import LogFile
path, name, count, max_bytes = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
log, rng = LogFile(path, max_bytes), random.Random(name)
print(flush=True)
sys.stdin.read()
for number in range(count):
    log.append(f"{name} {number} {'x' * rng.choice((1, 50, 3000))} end\\n".encode())
"""
CRASHER = """
import sys
from localgen.cli.errors import log_crash
print(flush=True)
sys.stdin.read()
for number in range(int(sys.argv[2])):
    log_crash(ValueError(f"{sys.argv[1]} {number} {'x' * 10_000} end"))
"""
# as a server does whose log is also its standard error
OWN_STREAMS = """
import os, sys
from pathlib import Path
from localgen.server.log_file import LogFile
log = LogFile(Path(sys.argv[1]), 1000)
for number in range(3):
    log.append(b"x" * 1000 + b"\\n")
os.write(1, b"out\\n")
os.write(2, b"last words\\n")
"""
# a server whose log is full when it starts, and which fails
FAILING = """
import sys
from pathlib import Path
from localgen.server.log_file import LogFile
LogFile(Path(sys.argv[1]), 1000).append(b"starts\\n")
print("error: no luck", file=sys.stderr)
sys.exit(1)
"""
# mean bytes of a record of WRITER
RECORD_BYTES = 1030


def start(program: str, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process that begins when its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=python_environment() | environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def begin(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


def end(processes: list[subprocess.Popen[bytes]], killed: subprocess.Popen[bytes] | None) -> None:
    for process in processes:
        status = process.wait(120)
        assert status == 0 or process is killed
        assert process.stdout is not None
        process.stdout.close()


def numbers_by_writer(path: Path) -> dict[str, list[int]]:
    """The numbers of the records in both files, in order. Fails if a line is no whole record."""
    found: dict[str, list[int]] = {}
    for file in (path.with_name("server.log.1"), path):
        for line in file.read_text().splitlines() if file.exists() else ():
            name, number, filling, last = line.split(" ")
            assert set(filling) == {"x"}
            assert last == "end"
            found.setdefault(name, []).append(int(number))
    return found


def write_in_parallel(path: Path, names: str, count: int, max_bytes: int, kill: bool) -> None:
    processes = [start(WRITER, path, name, count, max_bytes) for name in names]
    begin(processes)
    if kill:
        time.sleep(random.Random(names).uniform(0, 0.02))
        processes[0].send_signal(signal.SIGKILL)
    end(processes, processes[0] if kill else None)


@pytest.mark.parametrize("names", ["abcd", "efgh", "ijkl"])
def test_nothing_is_lost_when_the_log_is_rotated(tmp_path: Path, names: str) -> None:
    path, count = tmp_path / "server.log", 500
    # two files hold them all
    write_in_parallel(path, names, count, int(len(names) * count * RECORD_BYTES / 1.7), kill=False)
    assert path.with_name("server.log.1").exists()
    assert numbers_by_writer(path) == {name: list(range(count)) for name in names}


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("names", ["abcd", "efgh"])
def test_only_the_oldest_records_are_dropped(tmp_path: Path, names: str, kill: bool) -> None:
    path, count, max_bytes = tmp_path / "server.log", 1000, 100_000
    write_in_parallel(path, names, count, max_bytes, kill)
    found = numbers_by_writer(path)
    for name, numbers in found.items():
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[-1] == count - 1 or (kill and name == names[0])
    older = path.with_name("server.log.1")
    # writers that have just found the file full, each with a record
    assert max_bytes <= older.stat().st_size < max_bytes + 50_000
    assert {file.name for file in tmp_path.iterdir()} == {path.name, older.name}
    assert path.stat().st_mode & 0o777 == older.stat().st_mode & 0o777 == 0o600


def test_standard_streams_follow_the_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("ab") as log:
        process = subprocess.run(
            [sys.executable, "-c", OWN_STREAMS, str(path)],
            stdout=log,
            stderr=log,
            env=python_environment(),
            timeout=60,
            check=False,
        )
    assert process.returncode == 0
    assert path.read_text() == "out\nlast words\n"


def test_a_removed_log_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    log = LogFile(path, 1000)
    log.append(b"one\n")
    path.unlink()
    log.append(b"two\n")
    assert path.read_text() == "two\n"


def test_crashes_of_several_commands_are_whole_records(tmp_path: Path) -> None:
    count, names = 200, "abcdefgh"
    state = str(tmp_path / "state")
    processes = [start(CRASHER, name, count, LOCALGEN_STATE_DIR=state) for name in names]
    begin(processes)
    end(processes, None)
    records = (tmp_path / "state" / "crash.log").read_text().split("\n\n")
    assert records.pop() == ""
    for record in records:
        head, error = record.splitlines()
        assert " localgen " in head
        assert error.startswith("ValueError: ")
        assert error.endswith(f" {'x' * 10_000} end")
    found = [record.splitlines()[1].split()[1:3] for record in records]
    assert sorted(found) == sorted([name, str(number)] for name in names for number in range(count))


def test_the_reason_of_a_failed_start_is_found_in_a_rotated_log(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.create_dirs()
    settings.log_path.write_bytes(b"old\n" * 1000)
    command = [sys.executable, "-c", FAILING, str(settings.log_path)]
    with pytest.raises(ServerUnavailable, match="the server did not start: no luck"):
        LaunchedServer(settings, command).wait(lambda: False, lambda: False)
    assert settings.log_path.read_text() == "error: no luck\n"
