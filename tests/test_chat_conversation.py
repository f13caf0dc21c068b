"""Conversations are values: undo, fork, save and load."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.chat import saved_chats
from localgen.chat.conversation import Conversation, Turn, conversation_from_messages

ALPHABET = 'ab \n"\\é🙂{}'


def some_conversation(rng: random.Random) -> Conversation:
    def words() -> str:
        return "".join(rng.choices(ALPHABET, k=rng.randint(1, 12)))

    turns = tuple(
        Turn(words(), words(), stopped=rng.random() < 0.3) for _ in range(rng.randint(0, 6))
    )
    return Conversation(words() if rng.random() < 0.5 else None, turns)


@pytest.mark.parametrize("seed", range(50))
def test_undo_takes_back_what_was_added(seed: int) -> None:
    rng = random.Random(seed)
    conversation = some_conversation(rng)
    longer = conversation
    for number in range(3):
        longer = longer.with_turn(Turn(f"q{number}", f"a{number}"))
    assert longer.undo(3) == conversation
    assert longer.undo().undo().undo() == conversation
    assert longer.messages()[: len(conversation.messages())] == conversation.messages()


@pytest.mark.parametrize("turns", [0, -1, 3])
def test_undo_of_more_than_there_is_is_refused(turns: int) -> None:
    conversation = Conversation(None, (Turn("q", "a"), Turn("q", "a")))
    with pytest.raises(InvalidRequest, match=f"undo {turns} of 2"):
        conversation.undo(turns)


def test_a_prompt_follows_everything_said() -> None:
    conversation = Conversation("be brief", (Turn("q", "a"),))
    assert conversation.messages_with_prompt("next") == (
        Message("system", "be brief"),
        Message("user", "q"),
        Message("assistant", "a"),
        Message("user", "next"),
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_saved_chat_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.5, logit_bias={5: -1.5}, stop=("\n", "x"))
    chat = saved_chats.SavedChat("tiny", params, some_conversation(rng))
    path = saved_chats.chat_path("a name", tmp_path)
    saved_chats.create_chats_dir(tmp_path)
    saved_chats.save_chat(path, chat)
    assert saved_chats.load_chat(path) == chat
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert saved_chats.saved_chat_names(tmp_path) == ["a name"]
    assert [left.name for left in path.parent.iterdir()] == ["a name.json"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("notes", "{state}/chats/notes.json"),
        ("/x/notes.json", "/x/notes.json"),
        ("sub/notes", "sub/notes"),
        ("notes.json", "notes.json"),
    ],
)
def test_saved_chat_paths(name: str, place: str, tmp_path: Path) -> None:
    assert str(saved_chats.chat_path(name, tmp_path)) == place.format(state=tmp_path)


def test_saving_does_not_replace_another_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "precious.json"
    path.write_text('{"not": "a chat"}')
    with pytest.raises(InvalidRequest, match=r"precious\.json is not a saved chat"):
        saved_chats.save_chat(path, saved_chats.SavedChat("tiny", SamplingParams(), Conversation()))
    assert path.read_text() == '{"not": "a chat"}'


def test_saving_creates_no_folder_that_the_user_named(tmp_path: Path) -> None:
    chat = saved_chats.SavedChat("tiny", SamplingParams(), Conversation())
    with pytest.raises(InvalidRequest, match=r"the folder .*/gone does not exist"):
        saved_chats.save_chat(tmp_path / "gone" / "x.json", chat)
    with pytest.raises(InvalidRequest, match=r"cannot save to .* it is a folder"):
        saved_chats.save_chat(tmp_path, chat)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": "localgen-chat-2"}', "\x00\xff"],
)
def test_files_that_are_not_chats_are_rejected_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"broken\.json is not a saved chat"):
        saved_chats.load_chat(path)


def test_chat_with_roles_out_of_order_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    record = {
        "format": saved_chats.FILE_FORMAT,
        "model": "tiny",
        "parameters": {},
        "messages": said,
    }
    path.write_text(json.dumps(record))
    with pytest.raises(InvalidRequest, match=r"odd\.json is not a saved chat: .*turns"):
        saved_chats.load_chat(path)


def test_a_missing_chat_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read .*gone\.json: No such file"):
        saved_chats.load_chat(saved_chats.chat_path("gone", tmp_path))


@pytest.mark.parametrize("seed", range(20))
def test_conversation_survives_conversion_to_messages(seed: int) -> None:
    conversation = some_conversation(random.Random(seed))
    first = 1 if conversation.system else 0
    stopped = frozenset(
        first + 2 * at + 1 for at, turn in enumerate(conversation.turns) if turn.stopped
    )
    assert conversation_from_messages(conversation.messages(), stopped, {}) == conversation
