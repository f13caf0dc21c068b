"""Open the store of a state folder and find its sessions."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest, LocalgenError
from localgen.backends.terminal_text import collapse
from localgen.chat.database import STORE_NAME, StoreFailed, WriterLock
from localgen.chat.session_store import SessionRecord, SessionStore, SessionSummary


def has_store(state_dir: Path) -> bool:
    """True if the folder has a store."""
    return (state_dir / STORE_NAME).exists()


@contextlib.contextmanager
def open_store(state_dir: Path) -> Iterator[SessionStore]:
    """The store of all chats. Raises InvalidRequest, DiskFull or StoreFailed if it is unusable."""
    with (
        contextlib.closing(WriterLock(state_dir / "writers")) as writer,
        contextlib.closing(SessionStore(state_dir / STORE_NAME, writer)) as store,
    ):
        yield store


@contextlib.contextmanager
def open_store_or_copy(state_dir: Path, on_copy: Callable[[str], None]) -> Iterator[SessionStore]:
    """The store of all chats, or a temporary copy of it where nothing can be written.

    SQLite writes even to read. on_copy: gets the reason for a copy. Raises as open_store.
    """
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(open_store(state_dir))
        except (InvalidRequest, DiskFull, StoreFailed) as error:
            copy = _copy_store(state_dir, stack)
            if copy is None:
                raise
            try:
                store = stack.enter_context(open_store(copy))
            except LocalgenError:
                raise error from None
            on_copy(error.message)
        yield store


def _copy_store(state_dir: Path, stack: contextlib.ExitStack) -> Path | None:
    """Copy the database, if there is one, to a temporary folder. Returns None if that fails."""
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="localgen-")))
        # the second has transactions that are not in the first yet
        for name in (STORE_NAME, f"{STORE_NAME}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(state_dir / name, folder / name)
    except OSError:
        return None
    return folder


def list_with_turns(store: SessionStore) -> list[SessionSummary]:
    """Sessions that have turns, most recently changed first."""
    return [listed for listed in store.list_sessions() if listed.num_turns]


def find_session(store: SessionStore, name: str) -> SessionSummary | None:
    """Return the latest session of a name, ignoring case and spacing, or that of an id."""
    listed = store.list_sessions()
    wanted = collapse(name).casefold()
    named = (each for each in listed if collapse(each.name).casefold() == wanted)
    numbered = (each for each in listed if str(each.id) == wanted)
    return next(named, None) or next(numbered, None)


def require_session(store: SessionStore, name: str) -> SessionSummary:
    """Return the session of a name or an id. Raises InvalidRequest if there is none."""
    found = find_session(store, name)
    if found is None:
        raise InvalidRequest(f"session {name!r} not found: localgen history lists the stored ones")
    return found


def options_to_reopen(store: SessionStore, record: SessionRecord) -> str:
    """The options of `localgen chat` that open a stored session again, quoted for a shell."""
    listed = list_with_turns(store)
    if listed and listed[0].id == record.id:
        return "--continue"
    name = collapse(record.name)
    found = find_session(store, name)
    is_unique = found is not None and found.id == record.id
    return f"--session {shlex.quote(name if is_unique else str(record.id))}"


def latest_session(store: SessionStore) -> SessionRecord:
    """Read the session that changed last. Raises InvalidRequest if none has turns."""
    listed = list_with_turns(store)
    if not listed:
        raise InvalidRequest("no stored conversation to continue: localgen chat starts one")
    return store.read(listed[0].id)
