"""The state of one chat: its model, settings and conversations. Only it changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DRAFT_WORDS, ModelInfo
from localgen.chat import parameters
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.parameters import ModelOptions

if TYPE_CHECKING:
    from localgen.client import Answer, ModelClient, Text

FIRST_BRANCH = "main"
# what a user calls our model where no other is named
BUILT_IN = "tiny"

Progress = Callable[[float], None]


class Session:
    """A conversation with a loaded model, and the branches that were forked from it."""

    def __init__(self, client: ModelClient, state_dir: Path, options: ModelOptions) -> None:
        self.client = client
        self.state_dir = state_dir
        self._options = options
        self._options_lock = threading.Lock()
        self.branches = {FIRST_BRANCH: Conversation(options.system)}
        self.branch = FIRST_BRANCH
        self.info: ModelInfo | None = None
        self.asked: str | None = (
            None  # what the user calls the model; other files may share its name
        )
        self.last: Answer | None = None

    @property
    def options(self) -> ModelOptions:
        """Changed by set() and set_parameter() alone, as a model may be loading meanwhile."""
        return self._options

    def set(self, **changes: Any) -> None:
        """Change these fields of the options; the others stay what they are by now."""
        with self._options_lock:
            self._options = replace(self._options, **changes)

    def set_parameter(self, name: str, text: str) -> None:
        """Set a sampling parameter from text; `default` unsets it. InvalidRequest: what fits."""
        with self._options_lock:
            before, is_ours = self._options.params, not self.is_elsewhere
            params = parameters.with_parameter(before, name, text, checked=is_ours)
            self._options = replace(self._options, params=params)

    @property
    def conversation(self) -> Conversation:
        return self.branches[self.branch]

    @property
    def model(self) -> ModelInfo:
        """The loaded model. InvalidRequest: load() comes first."""
        if self.info is None:
            raise InvalidRequest(f"{self.name} is not loaded yet: ask it something first")
        return self.info

    @property
    def is_elsewhere(self) -> bool:
        """Whether the models are those of another server."""
        return bool(self.client.url)

    @property
    def name(self) -> str:
        """What the model is called, loaded or not."""
        default = "the server's model" if self.is_elsewhere else "the built-in model"
        return self.info.name if self.info is not None else self.asked or default

    @property
    def asked_name(self) -> str:
        """The name by which the user can ask for this model again; empty: not known yet."""
        if self.is_elsewhere:
            return self.asked or (self.info.name if self.info is not None else "")
        return self.asked or BUILT_IN

    @property
    def ctx(self) -> int | None:
        """The limit of prompt and answer in tokens; None: another server does not tell."""
        known = self.info.ctx if self.info is not None else 0
        return self._asked_ctx or known or None

    @property
    def _asked_ctx(self) -> int | None:
        """None: no limit of the user's, or a server that settles its context itself."""
        return None if self.is_elsewhere else self.options.ctx

    def load(self, name: str | None, on_progress: Progress) -> ModelInfo:
        """Load a model and talk to it from now on; on an error the old one stays."""
        load, is_another = self.options.load, self.info is not None and name != self.asked
        if is_another:
            # a template, a context and a draft model are chosen for one model and would be wrong
            # for the next
            draft = load.draft if load.draft in DRAFT_WORDS else None
            load = replace(load, chat_template=None, ctx=None, draft=draft)
        self.info = self.client.load(name, load, on_progress, self.options.keep_alive)
        self.asked = name
        if is_another:
            self.set(load=load, ctx=None)
        return self.info

    def ensure_loaded(self, on_progress: Progress) -> None:
        """The same model with the same options, on a server that may be a new one.

        Both may have left while nothing was asked; a request alone would bring the model back
        with options of the server's choice.
        """
        self.client.connect()
        self.load(self.asked, on_progress)

    def stream(self, prompt: str, *, again: bool = False) -> Generator[Text | Answer, None, None]:
        """An answer to a prompt; the conversation changes only through answered().

        again: as if the last turn had not been.
        """
        said = self.conversation.undo() if again else self.conversation
        return self.client.chat(
            self.asked,
            said.asking(prompt, with_reasoning=self._wants_reasoning()),
            self.options.params,
            ctx=self._asked_ctx,
            priority=self.options.priority,
        )

    def answered(self, turn: Turn, answer: Answer | None, *, again: bool = False) -> None:
        """Keep a turn. answer: None where it was stopped before the server could say more.

        again: in place of the last turn.
        """
        said = self.conversation.undo() if again else self.conversation
        self.change(said.with_turn(turn))
        self.last = answer

    def change(self, conversation: Conversation) -> None:
        """Another state of this branch; what was counted of the old one no longer holds."""
        self.branches[self.branch] = conversation
        self.last = None

    def fork(self, name: str | None) -> str:
        """Leave this branch as it is and go on in a copy. InvalidRequest: the name is taken."""
        name = name or self._free_name()
        if name in self.branches:
            raise InvalidRequest(f"there is a branch {name} already: /switch {name}")
        self.branches[name] = self.conversation
        self.branch = name
        return name

    def switch(self, name: str) -> None:
        """Go on in another branch. InvalidRequest: there is none of that name."""
        if name not in self.branches:
            raise InvalidRequest(f"no branch {name}: there is {', '.join(self.branches)}")
        self.branch = name
        self.last = None

    def why_same_again(self) -> str | None:
        """Why asking twice gives one answer; None: it does not."""
        params = self.options.params.with_defaults(self.model.sampling)
        if params.temperature == 0:
            return "temperature is 0"
        return "the seed is set" if params.seed is not None else None

    def used_tokens(self) -> int:
        """About how much of the context the conversation takes; exact after a whole answer."""
        if self.last is not None and self.last.total_tokens is not None:
            return self.last.total_tokens
        letters = sum(len(message.content) for message in self.conversation.messages())
        return letters // 4

    def _wants_reasoning(self) -> bool:
        """Whether the model's template has a use for what was thought in earlier turns."""
        return "reasoning_content" in (self.model.chat_template or "")

    def _free_name(self) -> str:
        number = len(self.branches)
        while f"fork{number}" in self.branches:
            number += 1
        return f"fork{number}"
