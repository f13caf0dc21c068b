"""The session store: what is stored, who may change it, and how damage is handled."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from localgen.backends.errors import DiskFull, InvalidRequest, LocalgenError
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import ToolCall
from localgen.chat.conversation import Conversation, ToolStep, Turn
from localgen.chat.database import SESSIONS_SCHEMA, StoreFailed, WriterLock
from localgen.chat.session_store import (
    INTERRUPTED_SUMMARY,
    SessionBusy,
    SessionChanged,
    SessionGone,
    SessionRecord,
    SessionStore,
)

NEW = SessionRecord(0)
ROOT = Path(__file__).parents[1]


class Program:
    """One of the programs that share the file."""

    def __init__(self, folder: Path) -> None:
        self.writer = WriterLock(folder / "writers")
        self.sessions = SessionStore(folder / "chats.db", self.writer, clock=lambda: 1000.0)

    def leave(self) -> None:
        self.sessions.close()
        self.writer.close()

    def die(self) -> None:
        """As if killed: nothing more is written, the lock is lost."""
        self.sessions.close()
        self.writer._lock_file.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.leave()


@pytest.fixture
def other(tmp_path: Path, one: Program) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.leave()


def some_turn(rng: random.Random) -> Turn:
    def words() -> str:
        return "".join(rng.choices("ab \n\0'\"%_\\é🙂\x1b\u2028", k=rng.randint(0, 9)))

    return Turn(words(), words(), rng.random() < 0.3, words(), words())


def some_kept(rng: random.Random, kept: SessionRecord) -> SessionRecord:
    """The same session with random other contents."""
    turns = list(kept.conversation.turns)[: rng.randint(0, 5)]
    turns += [some_turn(rng) for _ in range(rng.randint(0, 3))]
    system = rng.choice((None, "be brief", "über"))
    params = SamplingParams(
        temperature=rng.choice((None, 0.0, 1.5)), stop=("\n",), logit_bias={7: -1.0}
    )
    model = rng.choice((None, "tiny", "/a b/x.gguf"))
    return replace(
        kept,
        name=f"n{rng.random()}",
        model=model,
        params=params,
        ctx=rng.choice((None, 512)),
        conversation=Conversation(system, tuple(turns)),
    )


@pytest.mark.parametrize("seed", range(30))
def test_stored_sessions_are_read_back_equal(one: Program, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kept = one.sessions.create(some_kept(rng, NEW))
    beside = one.sessions.create(some_kept(rng, NEW))
    for _ in range(8):
        kept = one.sessions.update(some_kept(rng, kept))
        if rng.random() < 0.5:
            turn = some_turn(rng)
            kept = one.sessions.finish_turn(one.sessions.begin_turn(kept, turn.prompt), turn)
    again = Program(tmp_path)
    assert again.sessions.read(kept.id) == kept
    assert again.sessions.read(beside.id) == beside
    assert {listed.id: listed.num_turns for listed in again.sessions.list_sessions()} == {
        kept.id: len(kept.conversation.turns),
        beside.id: len(beside.conversation.turns),
    }
    again.leave()


def test_the_file_is_private(one: Program, tmp_path: Path) -> None:
    one.sessions.create(NEW)
    for path in tmp_path.glob("chats.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_programs_do_not_overwrite_each_other(one: Program, other: Program) -> None:
    mine = one.sessions.create(replace(NEW, name="shared"))
    theirs = other.sessions.read(mine.id)
    theirs = other.sessions.finish_turn(other.sessions.begin_turn(theirs, "q"), Turn("q", "theirs"))
    with pytest.raises(SessionChanged, match="shared was changed by another"):
        one.sessions.update(replace(mine, model="x"))
    with pytest.raises(SessionChanged):
        one.sessions.begin_turn(mine, "mine")
    assert one.sessions.read(mine.id) == theirs


def test_answer_in_progress_in_another_program_is_visible_and_not_overwritten(
    one: Program, other: Program
) -> None:
    mine = one.sessions.begin_turn(one.sessions.create(NEW), "q")
    before = other.sessions.data_version()
    one.sessions.update_turn(mine, Turn("q", "half", stopped=True))
    assert other.sessions.data_version() != before
    seen = other.sessions.read(mine.id)
    assert seen.unfinished_turn == Turn("q", "half", stopped=True)
    assert seen.conversation.turns == ()
    assert [listed.is_generating for listed in other.sessions.list_sessions()] == [True]
    for forbidden in (other.sessions.update, lambda kept: other.sessions.delete(kept.id)):
        with pytest.raises(SessionBusy, match="wait for it"):
            forbidden(seen)
    other.sessions.rename(mine.id, "renamed")
    done = one.sessions.finish_turn(mine, Turn("q", "whole"))
    assert other.sessions.read(mine.id).conversation == done.conversation


def test_killed_program_keeps_the_stored_part_of_its_answer(one: Program, other: Program) -> None:
    mine = one.sessions.begin_turn(one.sessions.create(NEW), "q")
    one.sessions.update_turn(mine, Turn("q", "half", stopped=True, reasoning="hm"))
    one.sessions.save_unsent_prompt(mine.id, "typed")
    before = other.sessions.read(mine.id)
    one.die()
    seen = other.sessions.read(mine.id)
    assert seen.unfinished_turn is None
    assert seen.conversation.turns == (Turn("q", "half", True, "hm", INTERRUPTED_SUMMARY),)
    assert other.sessions.load_unsent_prompt(mine.id) == "typed"
    with pytest.raises(SessionChanged):  # it would take the turn away
        other.sessions.update(before)
    assert other.sessions.update(replace(seen, name="goes on")).revision == seen.revision + 1


def test_killed_process_keeps_all_committed_tokens(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\n"
        "from localgen.chat.session_store import *\n"
        "from localgen.chat.database import WriterLock\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "sessions = SessionStore(folder / 'chats.db', WriterLock(folder / 'writers'))\n"
        "record = sessions.begin_turn(sessions.create(SessionRecord(0, 'it')), 'q')\n"
        "for n in range(10**9):\n"
        "    sessions.update_turn(record, Turn('q', 'x' * n))\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    process.wait()
    after = Program(tmp_path)
    (turn,) = after.sessions.read(after.sessions.list_sessions()[0].id).conversation.turns
    # all reported tokens are there, and perhaps one more
    assert len(turn.answer) - told[-1] in (0, 1)
    assert turn.summary == INTERRUPTED_SUMMARY
    after.leave()


def test_drafts_of_two_programs_stand_side_by_side(one: Program, other: Program) -> None:
    kept = one.sessions.create(NEW)
    one.sessions.save_unsent_prompt(kept.id, "mine")
    other.sessions.save_unsent_prompt(kept.id, "theirs")
    assert one.sessions.load_unsent_prompt(kept.id) == "mine"
    assert other.sessions.load_unsent_prompt(kept.id) == "theirs"
    one.sessions.save_unsent_prompt(kept.id, "")
    assert one.sessions.load_unsent_prompt(kept.id) == ""


def test_deleted_session_can_be_restored(one: Program, other: Program) -> None:
    kept = one.sessions.create(replace(NEW, conversation=Conversation(None, (Turn("q", "a"),))))
    one.sessions.delete(kept.id)
    assert one.sessions.list_sessions() == []
    assert other.sessions.list_sessions() == []
    for gone in (other.sessions.read, other.sessions.delete):
        with pytest.raises(SessionGone):
            gone(kept.id)
    one.sessions.restore(kept.id)
    assert other.sessions.read(kept.id) == kept


def test_deleted_sessions_are_purged_after_a_month(one: Program, tmp_path: Path) -> None:
    kept = one.sessions.create(NEW)
    one.sessions.delete(kept.id)
    month_s = 30 * 86_400.0
    SessionStore(tmp_path / "chats.db", one.writer, clock=lambda: 1000.0 + month_s).close()
    one.sessions.restore(kept.id)
    one.sessions.delete(kept.id)
    SessionStore(tmp_path / "chats.db", one.writer, clock=lambda: 1001.0 + month_s).close()
    with pytest.raises(SessionGone):
        one.sessions.restore(kept.id)


def test_prompt_history_is_in_order_of_time(one: Program) -> None:
    first = one.sessions.create(NEW)
    second = one.sessions.create(NEW)
    for prompt in "abca":
        first = one.sessions.finish_turn(one.sessions.begin_turn(first, prompt), Turn(prompt, "."))
    one.sessions.finish_turn(one.sessions.begin_turn(second, "z"), Turn("z", "."))
    assert one.sessions.recent_prompts(3) == ["c", "a", "z"]


def test_concurrent_threads_lose_no_turn(one: Program, other: Program) -> None:
    kept = one.sessions.create(NEW)
    faults: list[Exception] = []

    def ask(program: Program, prompt: str) -> None:
        for _ in range(10):
            try:
                begun = program.sessions.begin_turn(program.sessions.read(kept.id), prompt)
                program.sessions.update_turn(begun, Turn(prompt, "."))
                program.sessions.finish_turn(begun, Turn(prompt, ".."))
                asked.append(prompt)
            except (SessionChanged, SessionBusy):
                continue
            except Exception as fault:
                faults.append(fault)

    asked: list[str] = []
    threads = [
        threading.Thread(target=ask, args=(program, f"{at}"))
        for at, program in enumerate((one, one, other, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    turns = one.sessions.read(kept.id).conversation.turns
    assert sorted(turn.prompt for turn in turns) == sorted(asked)
    assert {turn.answer for turn in turns} == {".."}


def damaged(path: Path, kind: str) -> None:
    if kind == "newer":
        sqlite = sqlite3.connect(path)
        sqlite.execute("PRAGMA user_version = 99")
        sqlite.close()
    elif kind == "text":
        path.write_text("this is not a database\n" * 100)
    elif kind == "another program's":
        path.unlink()
        sqlite = sqlite3.connect(path)
        sqlite.execute("CREATE TABLE bookmarks (url)")
        sqlite.close()
    elif kind == "torn":
        whole = bytearray(path.read_bytes())
        whole[4096 : 3 * 4096] = os.urandom(2 * 4096)
        path.write_bytes(whole)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:4096])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("newer", "written by a newer localgen .format 99.*update localgen"),
        ("text", "is damaged .*was not changed; move it away"),
        ("another program's", "is not a chat database: move it away"),
        ("torn", "is damaged .*was not changed"),
        ("cut", "is damaged .*was not changed"),
    ],
)
def test_unusable_file_is_rejected_and_unchanged(tmp_path: Path, kind: str, told: str) -> None:
    program = Program(tmp_path)
    program.sessions.create(some_kept(random.Random(1), NEW))
    program.leave()
    path = tmp_path / "chats.db"
    damaged(path, kind)
    before = path.read_bytes()
    with pytest.raises(StoreFailed, match=told) as told_of:
        Program(tmp_path)
    assert str(path) in told_of.value.message
    assert path.read_bytes() == before


def test_a_database_of_format_3_is_upgraded(tmp_path: Path) -> None:
    """The file was dumped from one that localgen before tool calls wrote and then died."""
    path = tmp_path / "chats.db"
    with contextlib.closing(sqlite3.connect(path)) as sqlite:
        sqlite.executescript((Path(__file__).parent / "data/sessions_v3.sql").read_text())
        assert sqlite.execute("PRAGMA user_version").fetchone() == (3,)
        assert len(sqlite.execute("SELECT * FROM turns").fetchone()) == 8
    program = Program(tmp_path)
    fork, sums = (program.sessions.read(each.id) for each in program.sessions.list_sessions())
    assert (sums.name, sums.params.temperature, sums.ctx) == ("sums", 0.5, 1024)
    done = Turn(
        "What is 17 + 25?", "It is 42.", reasoning="17 + 25 = 42", summary="tiny · 3 tokens"
    )
    half = Turn("né 漢\nmore", "half", stopped=True)
    assert sums.conversation == Conversation("Be short.", (done, half))
    cut = Turn("cut by a crash", "so far", stopped=True, summary=INTERRUPTED_SUMMARY)
    assert (fork.conversation, fork.forked_from) == (Conversation(None, (done, cut)), sums.id)
    assert program.sessions.load_unsent_prompt(sums.id) == "unsent"
    steps = (ToolStep("", "", (ToolCall("1", "add", "{}"),), ("42",)),)
    called = replace(sums, conversation=sums.conversation.with_turn(Turn("a", "b", steps=steps)))
    program.sessions.update(called)
    program.leave()
    assert Program(tmp_path).sessions.read(sums.id).conversation.turns[2].steps == steps


def test_a_database_that_is_upgraded_meanwhile_is_not_changed(tmp_path: Path) -> None:
    program = Program(tmp_path)
    kept = program.sessions.create(NEW)
    with contextlib.closing(sqlite3.connect(tmp_path / "chats.db")) as sqlite:
        sqlite.execute("ALTER TABLE turns ADD COLUMN mood TEXT")
        sqlite.execute(f"PRAGMA user_version = {len(SESSIONS_SCHEMA) + 1}")
        before = list(sqlite.iterdump())
        told = "a newer localgen has upgraded .*chats.db .*start localgen again"
        for use in (
            lambda: program.sessions.begin_turn(kept, "hi"),
            lambda: program.sessions.update(kept),
            lambda: program.sessions.read(kept.id),
            program.sessions.list_sessions,
        ):
            with pytest.raises(StoreFailed, match=told):
                use()
        assert list(sqlite.iterdump()) == before


@pytest.mark.parametrize("kind", ["folder", "file instead of a folder"])
def test_unusable_path_is_rejected(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state" / "chats.db"
    if kind == "folder":
        path.mkdir(parents=True)
    else:
        (tmp_path / "state").write_text("")
    writer = WriterLock(tmp_path / "writers")
    with pytest.raises(StoreFailed, match=f"cannot use {path}"):
        SessionStore(path, writer)
    writer.close()


def test_a_full_disk_loses_nothing(one: Program, tmp_path: Path) -> None:
    kept = one.sessions.begin_turn(one.sessions.create(NEW), "q")
    one.sessions.update_turn(kept, Turn("q", "half"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a file size limit without its signal fails as a full disk does
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(path.stat().st_size for path in tmp_path.glob("chats.db*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 4096, limits[1]))
    try:
        with pytest.raises(DiskFull, match="free some space"):
            one.sessions.update_turn(kept, Turn("q", "x" * 1_000_000))
        assert one.sessions.read(kept.id).unfinished_turn is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    done = one.sessions.finish_turn(kept, Turn("q", "x" * 1_000_000))
    assert one.sessions.read(kept.id) == done


def test_lone_surrogates_can_be_kept(one: Program) -> None:
    kept = one.sessions.begin_turn(one.sessions.create(NEW), "a\ud800")
    one.sessions.finish_turn(kept, Turn("a\ud800", "\udfff🙂", summary="\ud83d\ude42"))
    (turn,) = one.sessions.read(kept.id).conversation.turns
    assert turn == Turn("a\ufffd", "\ufffd🙂", summary="🙂")


def test_a_writer_is_alive_as_long_as_its_lock(tmp_path: Path) -> None:
    one, other = WriterLock(tmp_path), WriterLock(tmp_path)
    assert one.is_alive(one.name)
    assert one.is_alive(other.name)
    other._lock_file.close()
    assert not one.is_alive(other.name)
    assert not one.is_alive("never was")
    third = WriterLock(tmp_path)
    third.close()
    assert not one.is_alive(third.name)
    assert [path.stem for path in tmp_path.iterdir()] == [one.name]
    one.close()


def test_writer_lock_in_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write to"):
        WriterLock(tmp_path / "file")
    assert issubclass(StoreFailed, LocalgenError)


def test_a_lock_that_its_owner_removes_meanwhile_does_not_matter(tmp_path: Path) -> None:
    # as one that is gone between listing the folder and looking at the file
    (tmp_path / "1-gone.lock").symlink_to("nowhere")
    WriterLock(tmp_path).close()
