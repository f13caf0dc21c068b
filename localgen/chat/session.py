"""The state of one chat: model, options and branches of the conversation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localgen.backends.errors import SHORTEN_PROMPT, ContextExceeded, InvalidRequest, LocalgenError
from localgen.backends.memory.kv_sizing import DEFAULT_CTX
from localgen.backends.model_info import DRAFT_KEYWORDS, LoadOptions, ModelInfo
from localgen.backends.sampling_params import SAMPLERS, SamplingParams, excludes_tools
from localgen.backends.types import OVERFLOW_ERROR, Message, Tool, ToolCall
from localgen.chat import parameters
from localgen.chat.conversation import (
    SUMMARY_PROMPT,
    Conversation,
    ToolStep,
    Turn,
    message_chars,
)
from localgen.chat.parameters import ModelOptions
from localgen.client.responses import TextDelta
from localgen.client.snapshot import ModelSnapshot, parse_localgen_stats
from localgen.hub.packaged import default_model
from localgen.hub.preset import Preset
from localgen.hub.resolve import find_preset, name_for_server
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, CallHandlers, CallResults, ChatTools
from localgen.mcp_tools.connections import McpConnections

if TYPE_CHECKING:
    from localgen.client import Client, Completion
    from localgen.client.responses import TokenAlternative

DEFAULT_BRANCH = "main"

OnProgress = Callable[[float], None]
_MAX_SUMMARY_TOKENS = 1024
# of the context: the most that a summary may take
_SUMMARY_SHARE = 1 / 4
_CHARS_PER_TOKEN = 4
# a turn is cut to no less
_MIN_TURN_CHARS = 200


def result_chars(ctx: int | None) -> int | None:
    """Characters of a tool result that take half of a context, at four of a token; None if the
    context is unknown."""
    return ctx * 2 if ctx else None


def template_uses_reasoning(model: ModelInfo) -> bool:
    """True if the chat template uses the reasoning of earlier messages."""
    return "reasoning_content" in (model.chat_template or "")


def _shortened(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The later half of the turns, or of the text of a single one."""
    if len(turns) > 1:
        return turns[(len(turns) + 1) // 2 :]
    prompt, answer = turns[0].prompt, turns[0].answer
    return (Turn(prompt[len(prompt) // 2 :], answer[len(answer) // 2 :]),)


@dataclass(frozen=True, slots=True)
class CompactedTurns:
    """The turns that compact() replaced. num_unread: the oldest ones, left out of the summary.

    used_tokens: of the conversation before, estimated if it was not known. is_cut: the summary is
    not complete. is_turn_cut: of the last turn, only the end was read.
    """

    num_turns: int
    num_unread: int
    used_tokens: int
    summary: str
    is_cut: bool = False
    is_turn_cut: bool = False


@dataclass(frozen=True, slots=True)
class _Compaction:
    """A conversation before and after compact()."""

    before: Conversation
    after: Conversation


@dataclass(frozen=True, slots=True)
class _Summary:
    text: str
    is_cut: bool


class ChatSession:
    """A chat with one model: the current conversation and the branches forked from it.

    used_tokens: of the conversation, as the server reported, or None if not known.
    model_info, last_completion, used_tokens: another thread may reset them at any moment, so read
    them once. tools: what the model may call.
    """

    def __init__(
        self,
        client: Client,
        state_dir: Path,
        options: ModelOptions,
        tools: ChatTools | None = None,
    ) -> None:
        self.client = client
        self.tools = ChatTools(McpConnections()) if tools is None else tools
        self.state_dir = state_dir
        self._options = options
        self._options_lock = threading.Lock()
        self.branches = {DEFAULT_BRANCH: Conversation(options.system)}
        self.branch = DEFAULT_BRANCH
        self.model_info: ModelInfo | None = None
        self.requested_model: str | None = (
            None  # name given by the user; other files may share the model's own name
        )
        self.last_completion: Completion | None = None
        self.used_tokens: int | None = None
        self._preset_ctx: int | None = None  # as of the last load, which precedes each request
        self._compaction: _Compaction | None = None

    @property
    def options(self) -> ModelOptions:
        """The options; changed only by set_options() and set_parameter(), which hold the lock."""
        return self._options

    def set_options(self, **changes: Any) -> None:
        """Change some fields of the options; safe while a model loads in another thread."""
        with self._options_lock:
            self._options = replace(self._options, **changes)

    def set_parameter(self, name: str, text: str) -> None:
        """Set a sampling parameter from text; `default` unsets it.

        Raises InvalidRequest if the name or the value is invalid.
        """
        with self._options_lock:
            before, is_ours = self._options.params, not self.is_remote
            params = parameters.with_parameter(before, name, text, validate=is_ours)
            self._options = replace(self._options, params=params)

    @property
    def conversation(self) -> Conversation:
        return self.branches[self.branch]

    @property
    def model(self) -> ModelInfo:
        """The loaded model. Raises InvalidRequest if none is loaded yet."""
        info = self.model_info
        if info is None:
            raise InvalidRequest(f"{self.name} is not loaded yet: send a prompt first")
        return info

    @property
    def is_remote(self) -> bool:
        """True if the client talks to a remote server."""
        return bool(self.client.url)

    @property
    def name(self) -> str:
        """Display name of the model, loaded or not."""
        info = self.model_info
        default = "the server's model" if self.is_remote else default_model()
        return info.name if info is not None else self.requested_model or default

    @property
    def requested_name(self) -> str:
        """The name to request this model by; empty if not known yet."""
        if self.is_remote:
            info = self.model_info
            return self.requested_model or (info.name if info is not None else "")
        return self.requested_model or default_model()

    @property
    def stored_name(self) -> str | None:
        """The name to store: a relative path would not be found from another folder."""
        name = self.requested_name or None
        return name if self.is_remote else name_for_server(name)

    @property
    def preset(self) -> Preset | None:
        """The preset that the model is, as models.toml has it now; None on a remote server."""
        return self._find_preset(self.requested_name)

    def _find_preset(self, name: str) -> Preset | None:
        if self.is_remote:
            return None
        try:
            return find_preset(name)
        except LocalgenError:
            return None  # the server says so when it is asked

    @property
    def system(self) -> str:
        """The system prompt of the next request; empty if there is none."""
        preset = self.preset
        return self.conversation.system or (preset.system if preset is not None else "")

    @property
    def ctx(self) -> int | None:
        """The context length in tokens, or None if unknown. Does not read the disk."""
        info = self.model_info
        loaded = None if info is None else self._preset_ctx or info.ctx
        return self._requested_ctx or loaded or None

    @property
    def _requested_ctx(self) -> int | None:
        """The context length set by the user; None if not set, or on a remote server."""
        return None if self.is_remote else self.options.ctx

    def load(self, name: str | None, on_progress: OnProgress) -> ModelInfo:
        """Load a model and make it the model of the chat; on an error the old one is kept."""
        load, is_another = (
            self.options.load,
            self.model_info is not None and name != self.requested_model,
        )
        if is_another:
            # chat template, context and draft model were chosen for the previous model
            draft = load.draft if load.draft in DRAFT_KEYWORDS else None
            load = replace(load, chat_template=None, ctx=None, draft=draft)
        wanted = load if is_another else self._load_with_context(load)
        info = self.client.load(name, wanted, on_progress, self.options.keep_alive)
        preset = self._find_preset(name or default_model())
        self._preset_ctx = None if preset is None else preset.ctx
        self.model_info, self.requested_model = info, name
        if is_another:
            self.set_options(load=load, ctx=None)
        return info

    def _load_with_context(self, load: LoadOptions) -> LoadOptions:
        """A context above the default must be loaded; a smaller one only limits requests."""
        ctx, default, info = self._requested_ctx or 0, DEFAULT_CTX, self.model_info
        if info is not None:
            default = min(default, info.ctx)
        return replace(load, ctx=ctx) if ctx > (load.ctx or default) else load

    def model_snapshots(self) -> tuple[ModelSnapshot, ...]:
        """The state of the loaded model at this moment; empty if it was unloaded.

        In a cluster each replica that has loaded it has one. Raises LocalgenError if the server
        does not run or reports no statistics.
        """
        models = parse_localgen_stats(self.client.stats()).models
        path = self.model_info.path if self.model_info is not None else ""
        if path and any(model.path for model in models):  # two files may have the same name
            return tuple(model for model in models if model.path == path)
        ours = {
            model.served_name
            for model in models
            if self.name == model.served_name or self.name in model.names
        }
        return tuple(model for model in models if model.served_name in ours)

    def ensure_loaded(self, on_progress: OnProgress) -> None:
        """Start the server and load the model again if needed, with the same options.

        Either may have been stopped while idle; a request alone would reload the model with the
        server's default options.
        """
        self.client.connect()
        self.load(self.requested_model, on_progress)

    def stream(
        self,
        prompt: str,
        *,
        regenerate: bool = False,
        beginning: str = "",
        steps: tuple[ToolStep, ...] = (),
    ) -> Generator[TextDelta | Completion, None, None]:
        """Stream an answer to a prompt. The conversation is unchanged until add_turn().

        regenerate: leave out the last turn. beginning: of the answer, which is continued. steps:
        of the answer so far; after MAX_ROUNDS of them the model has to answer without tools.
        Raises the errors of Client.chat; that of a parameter which is set says how to reset it.
        """
        conversation = self.conversation.undo() if regenerate else self.conversation
        self._require_tools_apply()
        try:
            yield from self.client.chat(
                self.requested_model,
                self._messages(conversation, prompt, beginning, steps),
                self.options.params,
                ctx=self._requested_ctx,
                priority=self.options.priority,
                save_prefix=self.options.save_prefix,
                on_overflow=self.options.on_overflow,
                tools=self.tools.offered,
                tool_choice="none" if len(steps) >= MAX_ROUNDS else "auto",
            )
        except ContextExceeded as error:
            remedied = self._with_remedies(error, conversation, prompt)
            raise self.tools.with_remedy(remedied) from error
        except InvalidRequest as error:
            name = error.param if error.param in parameters.PARAMETER_NAMES else None
            if name is None or getattr(self.options.params, name) is None:
                raise
            is_format = name == "json_schema"
            reset = "/set format text" if is_format else f"/set parameter {name} default"
            raise InvalidRequest(f"{error.message}; {reset} ends it", param=name) from error

    def _require_tools_apply(self) -> None:
        """Raise InvalidRequest if a parameter excludes the tools that are offered."""
        kind = excludes_tools(self.options.params)
        if kind and self.tools.offered:
            names = ", ".join(self.tools.servers)
            raise InvalidRequest(
                f"{kind} excludes tools, and those of {names} are offered: "
                f"/set parameter {kind} default, or /mcp off NAME",
                param=kind,
            )

    def _with_remedies(
        self, error: ContextExceeded, conversation: Conversation, prompt: str
    ) -> ContextExceeded:
        """The error with what makes room where the earlier turns fill the context."""
        is_full_alone = self.ctx is not None and len(prompt) // _CHARS_PER_TOKEN >= self.ctx
        drops = self.options.on_overflow != OVERFLOW_ERROR
        if is_full_alone or drops or not any(turn.answer for turn in conversation.turns):
            return error
        remedy = "/compact replaces the earlier turns by a summary"
        if not self.is_remote:
            remedy += ", --on-overflow drop-oldest leaves the oldest out"
        facts, shorten, rest = error.message.partition(SHORTEN_PROMPT)
        message = f"{facts}{remedy}{rest}" if shorten else f"{error.message}; {remedy}"
        return ContextExceeded(message, param=error.param)

    def run_calls(self, calls: tuple[ToolCall, ...], handlers: CallHandlers) -> CallResults:
        """Run the tool calls that a part of an answer ends with."""
        return self.tools.run(calls, handlers, result_chars(self.ctx))

    def next_tokens(
        self, turn_index: int, beginning: str, count: int
    ) -> tuple[TokenAlternative, ...]:
        """The most probable tokens after a beginning of a turn's answer; none where it would end.

        Raises the errors of Client.chat.
        """
        turns = self.conversation.turns
        before = replace(self.conversation, turns=turns[:turn_index])
        params = replace(
            self.options.params, max_tokens=1, logprobs=count, temperature=0.0, json_schema=None
        )
        turn = turns[turn_index]
        messages = self._messages(before, turn.prompt, beginning, turn.steps)
        with contextlib.closing(self._chat(messages, params, self.tools.offered)) as events:
            for event in events:
                if isinstance(event, TextDelta):
                    return event.alternatives
        return ()

    def compact(self) -> CompactedTurns:
        """Replace the turns before the last one, or a single one, by a summary of the model.

        The oldest turns are left out if the conversation does not fit the context. undo_compact()
        restores it. Raises
        InvalidRequest if there is nothing to summarize, or if the summary is empty or longer than
        that; the errors of Client.chat. The conversation is unchanged then.
        """
        self.require_answered()
        conversation, before = self.conversation, self.estimate_used_tokens()
        turns, last = conversation.turns[:-1], conversation.turns[-1:]
        if not any(turn.answer for turn in turns):
            turns, last = conversation.turns, ()
        read, summary = turns, None
        while summary is None:
            summary = self._summary_of(replace(self.conversation, turns=read))
            if summary is None and len(read) == 1 and read[0].num_chars <= _MIN_TURN_CHARS:
                raise InvalidRequest("the context has no room for a summary: /set ctx raises it")
            read = read if summary is not None else _shortened(read)
        if not summary.text.strip():
            raise InvalidRequest("the model wrote no summary: the conversation is unchanged")
        turn = Turn(SUMMARY_PROMPT, summary.text.strip())
        if turn.num_chars >= sum(each.num_chars for each in turns):
            raise InvalidRequest("the summary would be longer than the conversation: unchanged")
        after = replace(conversation, turns=(turn, *last))
        self.set_conversation(after)
        self._compaction = _Compaction(conversation, after)
        num_unread = len(turns) - len(read)
        return CompactedTurns(
            *(len(turns), num_unread, before, turn.answer, summary.is_cut),
            is_turn_cut=read[-1] is not turns[-1],
        )

    def undo_compact(self) -> bool:
        """Restore the turns before compact(). Returns False unless nothing has changed since."""
        done = self._compaction
        if done is None or self.conversation is not done.after:
            return False
        self.set_conversation(done.before)
        return True

    def require_answered(self) -> None:
        """Raise InvalidRequest if there is nothing to summarize."""
        if not any(turn.answer for turn in self.conversation.turns):
            raise InvalidRequest("there is no answer to summarize yet")

    def _summary_of(self, conversation: Conversation) -> _Summary | None:
        """The model's summary; None if the context has no room for it and the conversation."""
        most = _MAX_SUMMARY_TOKENS
        if self.ctx is not None:
            most = max(1, min(most, int(self.ctx * _SUMMARY_SHARE)))
        params = SamplingParams(
            **{each.name: getattr(self.options.params, each.name) for each in SAMPLERS},
            seed=self.options.params.seed,
            max_tokens=most,
            # of a model that reasons, half of it is for the summary
            thinking_budget=most // 2 if any(t.reasoning for t in conversation.turns) else None,
        )
        text, is_cut = "", False
        messages = self._messages(conversation, SUMMARY_PROMPT, "")
        try:
            with contextlib.closing(self._chat(messages, params)) as events:
                for event in events:
                    if isinstance(event, TextDelta):
                        text += event.text
                        continue
                    is_cut = event.finish_reason == "length"
                    if is_cut and event.completion_tokens < most:
                        return None
        except ContextExceeded:
            return None
        return _Summary(text, is_cut)

    def _chat(
        self,
        messages: tuple[Message, ...],
        params: SamplingParams,
        tools: tuple[Tool, ...] = (),
    ) -> Generator[TextDelta | Completion, None, None]:
        """Stream the answer to a request that is no turn of the conversation."""
        return self.client.chat(
            *(self.requested_model, messages, params),
            ctx=self._requested_ctx,
            save_prefix=False,
            tools=tools,
        )

    def _messages(
        self,
        conversation: Conversation,
        prompt: str,
        beginning: str,
        steps: tuple[ToolStep, ...] = (),
    ) -> tuple[Message, ...]:
        with_reasoning = template_uses_reasoning(self.model)
        messages = conversation.messages_with_prompt(prompt, with_reasoning=with_reasoning)
        for step in steps:
            messages += step.messages(with_reasoning=with_reasoning)
        return (*messages, Message("assistant", beginning)) if beginning else messages

    def require_regenerable(self) -> Turn:
        """The last turn. Raises InvalidRequest if there is none, or if it is a summary.

        What a summary was made of is not in the conversation any more.
        """
        turns = self.conversation.turns
        if not turns:
            raise InvalidRequest("there is no answer to regenerate yet")
        if turns[-1].prompt == SUMMARY_PROMPT:
            raise InvalidRequest("the turns of this summary are gone: it cannot be written again")
        return turns[-1]

    def add_turn(
        self,
        turn: Turn,
        completion: Completion | None,
        used_tokens: int | None = None,
        *,
        replace_last: bool = False,
    ) -> None:
        """Append a turn. completion: None if the answer was stopped.

        used_tokens: of the conversation with a stopped answer. replace_last: replace the last turn.
        """
        conversation = self.conversation.undo() if replace_last else self.conversation
        self.set_conversation(conversation.with_turn(turn))
        self.last_completion = completion
        self.used_tokens = used_tokens if completion is None else completion.total_tokens

    def add_regenerated(
        self, turn: Turn, completion: Completion | None, used_tokens: int | None = None
    ) -> None:
        """Replace the last turn; an answer that was stopped is added below a better one."""
        is_better = not turn.stopped or self.conversation.turns[-1].is_unanswered
        if is_better or not turn.is_unanswered:
            # one that is added below another is not in the prompt that was counted
            counted = used_tokens if is_better else None
            self.add_turn(turn, completion, counted, replace_last=is_better)

    def set_conversation(self, conversation: Conversation) -> None:
        """Replace the conversation of this branch and forget the last completion."""
        self.branches[self.branch] = conversation
        self.last_completion = self.used_tokens = None

    def fork(self, name: str | None) -> str:
        """Copy this branch, switch to the copy, and return its name.

        Raises InvalidRequest if the name is taken.
        """
        name = name or self._unused_branch_name()
        if name in self.branches:
            raise InvalidRequest(f"branch {name} already exists: /switch {name}")
        self.branches[name] = self.conversation
        self._enter_branch(name)
        return name

    def switch_branch(self, name: str) -> None:
        """Switch to another branch. Raises InvalidRequest if it does not exist."""
        if name not in self.branches:
            raise InvalidRequest(f"no branch {name}, branches are {', '.join(self.branches)}")
        self._enter_branch(name)
        self.last_completion = self.used_tokens = None

    def _enter_branch(self, name: str) -> None:
        # a session of its own; switching to the same one changes nothing
        if name != self.branch:
            self.branch = name
            self.tools.forget_permissions()

    def repeat_notice(self) -> str | None:
        """Return why a new answer is likely to be the same, or None if it is not.

        It is not certain: rounding depends on the batch, the cache and the number of threads.
        """
        params = self.options.params.with_defaults(self.model.sampling)
        if params.temperature != 0 and params.seed is None:
            return None
        why = "temperature is 0" if params.temperature == 0 else "the seed is set"
        return f"{why}, so the same settings usually give the same answer"

    def estimate_used_tokens(self) -> int:
        """`used_tokens`, or an estimate."""
        used = self.used_tokens
        if used is not None:
            return used
        return sum(map(message_chars, self.conversation.messages())) // _CHARS_PER_TOKEN

    def _unused_branch_name(self) -> str:
        number = len(self.branches)
        while f"fork{number}" in self.branches:
            number += 1
        return f"fork{number}"
