"""The files of aliases and endpoints: several processes at once, failed writes, odd texts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.client.endpoints import endpoints_path, load_endpoints
from localgen.config import BadSetting
from localgen.hub.aliases import add_alias, aliases_path, load_aliases
from localgen.toml_store import TomlStore

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = 8
# several each, so that the processes overlap however slowly they start
NAMES_EACH = 20
ADD_ALIASES = """
import sys
from localgen.hub.aliases import add_alias
for count in range(int(sys.argv[2])):
    add_alias(f"{sys.argv[1]}-{count}", "tiny")
"""
ADD_ENDPOINTS = """
import sys
from localgen.client.endpoints import Endpoint, add_endpoint
for count in range(int(sys.argv[2])):
    add_endpoint(Endpoint("http://h/v1", f"{sys.argv[1]}-{count}"))
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "state", "runtime"):
        monkeypatch.setenv(f"LOCALGEN_{name.upper()}_DIR", str(tmp_path / name))


@pytest.fixture
def store(tmp_path: Path) -> TomlStore:
    return TomlStore(tmp_path / "names" / "names.toml", "LOCALGEN_STATE_DIR")


def run_at_once(program: str) -> set[str]:
    """Run a program in several processes. Returns the names that they add."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"p{number}", str(NAMES_EACH)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(NUM_PROCESSES)
    ]
    for process in processes:
        _, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint
    return {f"p{n}-{count}" for n in range(NUM_PROCESSES) for count in range(NAMES_EACH)}


def test_aliases_of_several_processes_are_all_kept() -> None:
    added = run_at_once(ADD_ALIASES)
    assert set(load_aliases()) == added
    assert [path.name for path in aliases_path().parent.iterdir()] == ["models.toml"]


def test_endpoints_of_several_processes_are_all_kept() -> None:
    added = run_at_once(ADD_ENDPOINTS)
    assert set(load_endpoints()) == added
    assert [path.name for path in endpoints_path().parent.iterdir()] == ["endpoints.toml"]


def test_a_lock_file_of_a_killed_process_is_no_obstacle() -> None:
    aliases_path().parent.mkdir(mode=0o700)
    aliases_path().with_name(".models.toml.lock").touch()
    aliases_path().with_name(".models.toml.new").write_text("cut sho")
    add_alias("work", "tiny")
    assert load_aliases() == {"work": "tiny"}
    assert [path.name for path in aliases_path().parent.iterdir()] == ["models.toml"]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, BadSetting)],
)
def test_a_failed_write_keeps_the_file_and_leaves_no_other(
    store: TomlStore, monkeypatch: pytest.MonkeyPatch, reason: int, kind: type[Exception]
) -> None:
    def fail(fd: int) -> None:
        raise OSError(reason, os.strerror(reason))

    with store.locked():
        store.change(lambda document: document.update({"a": "1"}))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=os.strerror(reason)), store.locked():
        store.change(lambda document: document.update({"b": "2"}))
    assert store.read() == {"a": "1"}
    assert [path.name for path in store.path.parent.iterdir()] == ["names.toml"]


def test_only_the_user_can_read_it(store: TomlStore) -> None:
    with store.locked():
        store.change(lambda document: document.update({"a": "1"}))
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_change_keeps_comments_and_layout(store: TomlStore) -> None:
    written = '# mine\na  =  "1" # one\n\n[table]\nb = """\n[no table]\n"""\n'
    with store.locked():
        store.path.write_text(written)
        store.change(lambda document: document.update({"c.d": "2"}))
        assert store.read() == {"a": "1", "c.d": "2", "table": {"b": "[no table]\n"}}
        store.change(lambda document: document.pop("c.d"))
    assert store.read_text() == written


@pytest.mark.parametrize("text", ["", 'a "b" \\ c', "\x7f\x00\x1b\n", "é \U0001f600 \u2028"])
def test_any_text_can_be_stored(store: TomlStore, text: str) -> None:
    with store.locked():
        store.change(lambda document: document.update({"a": text}))
    assert store.read() == {"a": text}


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    add_alias("work", "tiny")
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        add_alias("odd", os.fsdecode(b"/models/\xff.gguf"))
    assert load_aliases() == {"work": "tiny"}


def test_a_folder_that_cannot_be_created(store: TomlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(DiskFull, match="No space left on device"), store.locked():
        pass
