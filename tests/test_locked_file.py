"""Files that several processes change: concurrent and killed writers, full disks, private modes."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from localgen.backends.sampling_params import SamplingParams
from localgen.chat.conversation import Conversation
from localgen.chat.saved_chats import SavedChat, load_chat, save_chat
from localgen.locked_file import LockedFile

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = 6
# each writer adds entries until it is killed, and prints those that are stored
WRITER = """
import sys
from pathlib import Path

folder, kind, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
# each imports only what it writes with
if kind == "models.toml":
    from localgen.hub import aliases

    add = lambda name: aliases.add_alias(name, "tiny")
elif kind == "endpoints.toml":
    from localgen.client import endpoints

    add = lambda name: endpoints.add_endpoint(endpoints.Endpoint("http://h/v1", name))
elif kind == "measurements.json":
    from localgen.machine import measurements

    measurements.measurements_path = lambda: folder / "cache" / "measurements.json"
    measurements.is_machine_busy = lambda: False
    measurements._key = lambda name: name
    add = lambda name: measurements.cached_or_measured(name, int, lambda: 1, remeasure=False)
else:
    from localgen.repl.prompt import PromptHistory

    history = PromptHistory(folder / "prompts" / "chat_history", sys.exit, can_write=True)
    # longer than what is written at once
    add = lambda name: history.store_string("\\n".join([name] * 2000))
for count in range(int(sys.argv[4])):
    name = f"p{number}-{count}"
    add(name)
    print(name, flush=True)
"""


@dataclass(frozen=True)
class Store:
    """A file, relative to the test's folder, and how to read its names."""

    path: str
    read: Callable[[str], Iterable[str]] = tomllib.loads

    def names(self, folder: Path) -> set[str]:
        return set(self.read((folder / self.path).read_text()))


def prompts(text: str) -> Iterator[str]:
    """The first lines of prompts that repeat it."""
    for entry in text.split("\n# ")[1:]:
        lines = entry.splitlines()[1:]
        assert lines == lines[:1] * 2000
        yield lines[0].removeprefix("+")


STORES = {
    "models.toml": Store("state/models.toml"),
    "endpoints.toml": Store("config/endpoints.toml"),
    "measurements.json": Store("cache/measurements.json", json.loads),
    "chat_history": Store("prompts/chat_history", prompts),
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "state", "runtime"):
        monkeypatch.setenv(f"LOCALGEN_{name.upper()}_DIR", str(tmp_path / name))


def start_writer(
    folder: Path, kind: str, number: int, count: int = 1_000_000
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), kind, str(number), str(count)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_stored_is_kept_although_writers_are_killed(
    tmp_path: Path, kind: str, seed: int
) -> None:
    """Every name that a writer reported is there, the file is whole, and nothing is left over."""
    (tmp_path / "prompts").mkdir()
    luck, store = random.Random(seed), STORES[kind]
    writers = [start_writer(tmp_path, kind, number) for number in range(NUM_PROCESSES)]
    stored = {writer.stdout.readline().strip() for writer in writers if writer.stdout}
    for writer in writers:
        # at a random moment of a write, while those that are left go on
        time.sleep(luck.uniform(0, 0.1))
        writer.kill()
        said, complaint = writer.communicate(timeout=60)
        assert not complaint
        # the last line may be cut off by the kill
        stored |= {line for line in said.splitlines(keepends=True) if line.endswith("\n")}
    stored = {name.strip() for name in stored}
    assert len(stored) >= NUM_PROCESSES
    assert stored <= store.names(tmp_path)

    said, _ = start_writer(tmp_path, kind, 99, 1).communicate(timeout=60)
    assert stored | {said.strip()} <= store.names(tmp_path)
    path = tmp_path / store.path
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("leftover", ["new", "lock"])
def test_the_next_write_removes_what_a_killed_writer_left(tmp_path: Path, leftover: str) -> None:
    file = LockedFile(tmp_path / "names")
    file.path.with_name(f".names.{leftover}").write_text("cut sho")
    file.store("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["names"]
    assert file.read_text() == "whole"


def test_a_reader_sees_no_unfinished_file(tmp_path: Path) -> None:
    """Texts of one letter each, of several pages."""
    file = LockedFile(tmp_path / "letters")
    file.store("a" * 100_000)
    program = (
        "import itertools, sys\nfrom pathlib import Path\n"
        "from localgen.locked_file import LockedFile\n"
        "for letter in itertools.cycle('abc'):\n"
        "    LockedFile(Path(sys.argv[1])).store(letter * 100_000)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(file.path)], cwd=ROOT)
        for _ in range(2)
    ]
    try:
        seen: set[str] = set()
        deadline_s = time.monotonic() + 60
        while seen != set("abc") and time.monotonic() < deadline_s:
            text = file.read_text()
            assert len(text) == 100_000
            assert len(set(text)) == 1
            seen |= set(text)
        assert seen == set("abc")
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


FULL_DISK = """
import resource, sys
from pathlib import Path
from localgen.backends.errors import LocalgenError
from localgen.hub.aliases import add_alias
from localgen.machine import measurements
from localgen.tui.preferences import Preferences

folder = Path(sys.argv[1])
measurements.measurements_path = lambda: folder / "state" / "measurements.json"
measurements.is_machine_busy = lambda: False
add_alias("kept", "tiny")
resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
Preferences(folder / "state" / "theme.json").save_theme("light")
measurements.cached_or_measured("rate", int, lambda: 1, remeasure=False)
try:
    add_alias("lost", "tiny")
except LocalgenError as error:
    print(error.message)
"""


def test_a_write_that_does_not_fit_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "cannot write" in done.stdout, done.stderr
    assert tomllib.loads((tmp_path / "state/models.toml").read_text()) == {"kept": "tiny"}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["models.toml"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_private_whatever_was_there(tmp_path: Path) -> None:
    file = LockedFile(tmp_path / "names")
    for path in (file.path, file.path.with_name(".names.new")):
        path.write_text("")
        path.chmod(0o666)
    file.store("a")
    assert mode_of(file.path) == 0o600
    shared = LockedFile(tmp_path / "shared", mode=0o666)
    before = os.umask(0o022)
    try:
        shared.store("a")
    finally:
        os.umask(before)
    assert mode_of(shared.path) == 0o644


def test_the_lock_and_the_unfinished_file_can_be_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "refs"
    folder.mkdir()
    file = LockedFile(folder / "main", scratch=tmp_path)
    with file.locked():
        assert (tmp_path / ".main.lock").exists()
        assert not list(folder.iterdir())
        file.write("abc")
    assert [path.name for path in folder.iterdir()] == ["main"]
    assert [path.name for path in tmp_path.iterdir()] == ["refs"]


def test_a_saved_chat_is_private_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for model in ("a", "b"):
        save_chat(path, SavedChat(model, SamplingParams(), Conversation()))
    assert load_chat(path).model == "b"
    assert mode_of(path) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
