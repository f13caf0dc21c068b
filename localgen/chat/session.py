"""The state of one chat: its model, settings and conversations. Only it changes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DRAFT_KEYWORDS, ModelInfo
from localgen.chat import parameters
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.parameters import ModelOptions

if TYPE_CHECKING:
    from localgen.client import Completion, ModelClient, TextDelta

DEFAULT_BRANCH = "main"
# what a user calls our model where no other is named
BUILT_IN_MODEL = "tiny"

OnProgress = Callable[[float], None]


class ChatSession:
    """A conversation with a loaded model, and the branches that were forked from it."""

    def __init__(self, client: ModelClient, state_dir: Path, options: ModelOptions) -> None:
        self.client = client
        self.state_dir = state_dir
        self._options = options
        self._options_lock = threading.Lock()
        self.branches = {DEFAULT_BRANCH: Conversation(options.system)}
        self.branch = DEFAULT_BRANCH
        self.model_info: ModelInfo | None = None
        self.requested_model: str | None = (
            None  # what the user calls the model; other files may share its name
        )
        self.last_completion: Completion | None = None

    @property
    def options(self) -> ModelOptions:
        """Changed by set() and set_parameter() alone, as a model may be loading meanwhile."""
        return self._options

    def set_options(self, **changes: Any) -> None:
        """Change these fields of the options; the others stay what they are by now."""
        with self._options_lock:
            self._options = replace(self._options, **changes)

    def set_parameter(self, name: str, text: str) -> None:
        """Set a sampling parameter from text; `default` unsets it. InvalidRequest: what fits."""
        with self._options_lock:
            before, is_ours = self._options.params, not self.is_remote
            params = parameters.with_parameter(before, name, text, validate=is_ours)
            self._options = replace(self._options, params=params)

    @property
    def conversation(self) -> Conversation:
        return self.branches[self.branch]

    @property
    def model(self) -> ModelInfo:
        """The loaded model. InvalidRequest: load() comes first."""
        if self.model_info is None:
            raise InvalidRequest(f"{self.name} is not loaded yet: ask it something first")
        return self.model_info

    @property
    def is_remote(self) -> bool:
        """Whether the models are those of another server."""
        return bool(self.client.url)

    @property
    def name(self) -> str:
        """What the model is called, loaded or not."""
        default = "the server's model" if self.is_remote else "the built-in model"
        return (
            self.model_info.name if self.model_info is not None else self.requested_model or default
        )

    @property
    def requested_name(self) -> str:
        """The name by which the user can ask for this model again; empty: not known yet."""
        if self.is_remote:
            return self.requested_model or (
                self.model_info.name if self.model_info is not None else ""
            )
        return self.requested_model or BUILT_IN_MODEL

    @property
    def ctx(self) -> int | None:
        """The limit of prompt and answer in tokens; None: another server does not tell."""
        known = self.model_info.ctx if self.model_info is not None else 0
        return self._requested_ctx or known or None

    @property
    def _requested_ctx(self) -> int | None:
        """None: no limit of the user's, or a server that settles its context itself."""
        return None if self.is_remote else self.options.ctx

    def load(self, name: str | None, on_progress: OnProgress) -> ModelInfo:
        """Load a model and talk to it from now on; on an error the old one stays."""
        load, is_another = (
            self.options.load,
            self.model_info is not None and name != self.requested_model,
        )
        if is_another:
            # a template, a context and a draft model are chosen for one model and would be wrong
            # for the next
            draft = load.draft if load.draft in DRAFT_KEYWORDS else None
            load = replace(load, chat_template=None, ctx=None, draft=draft)
        self.model_info = self.client.load(name, load, on_progress, self.options.keep_alive)
        self.requested_model = name
        if is_another:
            self.set_options(load=load, ctx=None)
        return self.model_info

    def ensure_loaded(self, on_progress: OnProgress) -> None:
        """The same model with the same options, on a server that may be a new one.

        Both may have left while nothing was asked; a request alone would bring the model back
        with options of the server's choice.
        """
        self.client.connect()
        self.load(self.requested_model, on_progress)

    def stream(
        self, prompt: str, *, regenerate: bool = False
    ) -> Generator[TextDelta | Completion, None, None]:
        """An answer to a prompt; the conversation changes only through add_turn().

        regenerate: as if the last turn had not been.
        """
        said = self.conversation.undo() if regenerate else self.conversation
        return self.client.chat(
            self.requested_model,
            said.messages_with_prompt(prompt, with_reasoning=self._template_uses_reasoning()),
            self.options.params,
            ctx=self._requested_ctx,
            priority=self.options.priority,
        )

    def add_turn(
        self, turn: Turn, completion: Completion | None, *, replace_last: bool = False
    ) -> None:
        """Keep a turn. completion: None where it was stopped before the server could say more.

        replace_last: in place of the last turn.
        """
        said = self.conversation.undo() if replace_last else self.conversation
        self.set_conversation(said.with_turn(turn))
        self.last_completion = completion

    def set_conversation(self, conversation: Conversation) -> None:
        """Another state of this branch; what was counted of the old one no longer holds."""
        self.branches[self.branch] = conversation
        self.last_completion = None

    def fork(self, name: str | None) -> str:
        """Leave this branch as it is and go on in a copy. InvalidRequest: the name is taken."""
        name = name or self._unused_branch_name()
        if name in self.branches:
            raise InvalidRequest(f"there is a branch {name} already: /switch {name}")
        self.branches[name] = self.conversation
        self.branch = name
        return name

    def switch_branch(self, name: str) -> None:
        """Go on in another branch. InvalidRequest: there is none of that name."""
        if name not in self.branches:
            raise InvalidRequest(f"no branch {name}: there is {', '.join(self.branches)}")
        self.branch = name
        self.last_completion = None

    def deterministic_reason(self) -> str | None:
        """Why asking twice gives one answer; None: it does not."""
        params = self.options.params.with_defaults(self.model.sampling)
        if params.temperature == 0:
            return "temperature is 0"
        return "the seed is set" if params.seed is not None else None

    def estimate_used_tokens(self) -> int:
        """About how much of the context the conversation takes; exact after a whole answer."""
        if self.last_completion is not None and self.last_completion.total_tokens is not None:
            return self.last_completion.total_tokens
        letters = sum(len(message.content) for message in self.conversation.messages())
        return letters // 4

    def _template_uses_reasoning(self) -> bool:
        """Whether the model's template has a use for what was thought in earlier turns."""
        return "reasoning_content" in (self.model.chat_template or "")

    def _unused_branch_name(self) -> str:
        number = len(self.branches)
        while f"fork{number}" in self.branches:
            number += 1
        return f"fork{number}"
