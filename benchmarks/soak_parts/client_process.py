"""One client of the soak: sends requests, uses the stores, and logs what happened to each.

A line of the log says that a request begins, another how it ended. The process may be killed at any
moment: each line is written at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.chat.conversation import Turn
from localgen.chat.session_store import SessionRecord, SessionStore
from localgen.chat.stored_sessions import open_store
from localgen.client import Completion, LocalClient
from localgen.config import ServerSettings
from localgen.hub.aliases import add_alias, remove_alias

MODEL = "tiny"
_SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})
_WORDS = ("one", "river", "tells", "the", "old", "house", "about", "seven", "birds", "of", "stone")


class Log:
    """Lines of JSON, each written by one call."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **fields: Any) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


class SoakClient:
    """name: unique among all client processes."""

    def __init__(self, name: str, log: Log, client: LocalClient, store: SessionStore) -> None:
        self._name, self._log, self._client, self._store = name, log, client, store
        self._random = random.Random(name)
        self._record = store.create(SessionRecord(id=0, name=name, model=MODEL))

    def run(self, number: int) -> None:
        """One request of a random kind."""
        kinds: tuple[Callable[[], str], ...] = (
            *(self._chat,) * 12, self._cancel, self._schema, self._too_long, self._invalid,
            self._embed, self._alias,
        )  # fmt: skip
        kind = self._random.choice(kinds)
        began_s = time.monotonic()
        self._log.write(begin=number, kind=kind.__name__)
        try:
            outcome = kind()
        except LocalgenError as error:
            outcome = error.code
            if outcome == "internal_error":
                self._log.write(defect=error.message)
        except Exception:
            outcome = "defect"
            self._log.write(defect=traceback.format_exc())
        self._log.write(end=number, outcome=outcome, seconds=round(time.monotonic() - began_s, 4))

    def _chat(self) -> str:
        prompt = self._prompt(self._random.choice((3, 10, 10, 60, 300)))
        self._record = self._store.begin_turn(self._record, prompt)
        try:
            answer = self._ask(prompt, SamplingParams(max_tokens=self._random.choice((1, 8, 32))))
        except LocalgenError as error:
            self._end_turn(Turn(prompt, str(error), stopped=True))
            raise
        self._end_turn(Turn(prompt, answer))
        return "answer"

    def _end_turn(self, turn: Turn) -> None:
        self._record = self._store.finish_turn(self._record, turn)
        self._log.write(turns=len(self._record.conversation.turns), session=self._record.id)

    def _schema(self) -> str:
        self._ask("a number", SamplingParams(max_tokens=16, json_schema=_SCHEMA))
        return "answer"

    def _too_long(self) -> str:
        self._ask(self._prompt(6000), SamplingParams(max_tokens=8))
        return "defect: too long a prompt was answered"

    def _invalid(self) -> str:
        self._ask("hi", SamplingParams(max_tokens=8, regex="(unclosed"))
        return "defect: an invalid regular expression was answered"

    def _embed(self) -> str:
        list(self._client.embed(MODEL, ["a text"]))
        return "answer"

    def _cancel(self) -> str:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        parts = self._client.chat(MODEL, (Message("user", self._prompt(10)),), params)
        with contextlib.closing(parts):
            next(parts)
        return "cancelled"

    def _alias(self) -> str:
        name = f"{self._name}-{self._random.randrange(10**9)}"
        add_alias(name, MODEL)
        self._log.write(alias=name)
        if self._random.random() < 0.5:
            self._log.write(removing=name)
            remove_alias(name)
        return "stored"

    def _ask(self, prompt: str, params: SamplingParams) -> str:
        """The answer. Raises AssertionError unless it ends exactly once, at its end."""
        text, ends = "", 0
        for part in self._client.chat(MODEL, (Message("user", prompt),), params):
            assert not ends, "something came after the end"
            if isinstance(part, Completion):
                ends += 1
            else:
                text += part.text
        assert ends == 1, "the stream ended without an end"
        return text

    def _prompt(self, num_words: int) -> str:
        start = "You are brief. " if self._random.random() < 0.5 else ""
        return start + " ".join(self._random.choices(_WORDS, k=num_words))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("log", type=Path)
    parser.add_argument("requests", type=int)
    options = parser.parse_args()
    settings = ServerSettings.from_environment()
    with open_store(settings.state_dir) as store, LocalClient(settings) as client:
        soak = SoakClient(options.name, Log(options.log), client, store)
        for number in range(options.requests):
            # as a command does: it starts a server where none runs
            with contextlib.suppress(LocalgenError):
                client.connect()
            soak.run(number)


if __name__ == "__main__":
    main()
