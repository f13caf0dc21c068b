"""The slash commands of a chat: parsing, execution and output."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from localgen.backends import units
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DraftInfo, ModelInfo
from localgen.backends.terminal_text import one_line
from localgen.chat import mcp_report, report, saved_chats, settings, stats_report
from localgen.chat.session import ChatSession, OnProgress

_USAGE_WIDTH = 25  # leaves room for the help in 80 columns
COMMAND_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Text to show to the user. is_new_conversation: another conversation begins, or was loaded."""

    text: str
    is_new_conversation: bool = False


@dataclass(frozen=True, slots=True)
class Regenerate:
    """The last prompt, to be answered again now; its turn stays until there is an answer."""

    prompt: str


@dataclass(frozen=True, slots=True)
class LeaveChat:
    """The user leaves the chat."""


CommandResult = CommandOutput | Regenerate | LeaveChat


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command. choices: values of its first argument, for completion."""

    name: str
    usage: str
    help: str
    run: Callable[[ChatSession, str, OnProgress], CommandResult]
    choices: tuple[str, ...] = ()


def is_command(line: str) -> bool:
    """Return True for a command: `/word`, or `/` alone, which is an unfinished one.

    `/usr/bin` and lines with a leading space are prompts.
    """
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    is_word = word.count("/") == 1 and len(word) > 1
    return line.startswith("/") and (is_word or line.strip() == "/")


def run_command(session: ChatSession, line: str, on_progress: OnProgress) -> CommandResult:
    """Run a command line. Raises LocalgenError if it fails; nothing has changed then."""
    word, _, argument = line.strip().partition(" ")
    return find_command(word).run(session, argument.strip(), on_progress)


def needs_model(line: str) -> bool:
    """Return True if a command needs the model to be loaded."""
    shows_model = line.split() in (["/show"], ["/show", "info"], ["/show", "template"])
    return shows_model or asks_model(line)


def asks_model(line: str) -> bool:
    """Return True if the model answers a command, which may take a while."""
    return line.split() == ["/compact"]


def server_to_start(line: str) -> str | None:
    """The MCP server that a command starts, which may take a while; None for other commands."""
    match line.split():
        case ["/mcp", name] if name != "off":
            return name
    return None


def argument_choices(word: str, before: str) -> tuple[str, ...]:
    """Completions of the next argument of a command. before: the arguments that precede it."""
    if word == "/set" and before:
        return settings.SETTING_VALUES.get(before, ())
    return SLASH_COMMANDS[word].choices if word in SLASH_COMMANDS and not before else ()


def find_command(word: str) -> SlashCommand:
    """Return the command of a word such as `/set`, or of an alias.

    Raises InvalidRequest with the closest match if there is none.
    """
    name = COMMAND_ALIASES.get(word, word)
    if name in SLASH_COMMANDS:
        return SLASH_COMMANDS[name]
    close = difflib.get_close_matches(name, SLASH_COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see /help"
    raise InvalidRequest(f"no command {word}: {hint} (a leading space sends it as a prompt)")


def _set(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    said = settings.change_setting(session, argument)
    if said is None:
        raise _usage_error("/set", argument)
    return CommandOutput(said)


def _show(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    what = argument or "info"
    if what == "info":
        return CommandOutput(_model_info_text(session))
    if what == "parameters":
        return CommandOutput(settings.parameters_text(session))
    if what == "template":
        if session.model.url:
            return CommandOutput(
                "the model is on a remote server, which does not report its chat template"
            )
        return CommandOutput(session.model.chat_template or "the model has no chat template")
    if what == "system":
        return CommandOutput(settings.system_text(session))
    raise _usage_error("/show", argument)


def _model_info_text(session: ChatSession) -> str:
    info = session.model
    if info.url:
        return _remote_info_text(session)
    ctx = session.ctx or info.ctx
    rows = [
        ("model", info.name),
        ("file", info.path),
        ("kind", f"{info.architecture} · {info.description} · {info.params / 1e6:,.1f}M params"),
        (
            "size",
            f"{units.format_size(info.size_bytes)} · KV cache {units.format_size(info.kv_bytes)}",
        ),
        *((("KV tiers", tiers),) if (tiers := " · ".join(_tier_parts(info))) else ()),
        ("context", f"{ctx:,} in use · {info.ctx:,} loaded · {info.ctx_train:,} trained"),
        ("runs on", " · ".join(_placement_parts(info))),
        *((("drafts", _draft_text(info.draft)),) if info.draft else ()),
        *_chat_rows(session),
        *(("note", note) for note in info.notes),
    ]
    return _text(f"{name:<9} {value}" for name, value in rows)


def _remote_info_text(session: ChatSession) -> str:
    info = session.model
    rows = [
        ("model", info.name),
        ("server", info.url),
        *((("context", f"{info.ctx:,}"),) if info.ctx else ()),
        *_chat_rows(session),
        *(("note", note) for note in info.notes),
    ]
    return _text(f"{name:<9} {value}" for name, value in rows)


def _chat_rows(session: ChatSession) -> Iterator[tuple[str, str]]:
    turns = units.format_count(len(session.conversation.turns), "turn")
    yield "branch", f"{session.branch} · {turns}"
    if tools := report.tool_counts(session.tools):
        yield "tools", f"{tools} · /mcp lists them"


def _draft_text(draft: DraftInfo) -> str:
    size = units.format_size(draft.size_bytes)
    kv_size = units.format_size(draft.kv_bytes)
    return f"{draft.name} · {draft.description} · {size} · KV cache {kv_size}"


def _tier_parts(info: ModelInfo) -> Iterator[str]:
    """Limits of the tiers that keep prefixes outside of the KV cache."""
    if info.options.kv_ram:
        yield f"{units.format_size(info.options.kv_ram)} of RAM"
    if info.options.kv_disk:
        yield f"{units.format_size(info.options.kv_disk)} of disk, for all models together"


def _placement_parts(info: ModelInfo) -> Iterator[str]:
    yield info.backend
    yield info.processor
    if info.options.threads is not None:
        yield units.format_count(info.options.threads, "thread")
    if info.backend_reason:
        yield info.backend_reason


def _save(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    path = saved_chats.chat_path(settings.unquoted(argument) or "last", session.state_dir)
    chat = saved_chats.SavedChat(session.name, session.options.params, session.conversation)
    saved_chats.create_chats_dir(session.state_dir)
    saved_chats.save_chat(path, chat)
    count = units.format_count(len(session.conversation.turns), "turn")
    return CommandOutput(one_line(f"saved {count} to {path}"))


def _load(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if not argument:
        names = ", ".join(saved_chats.saved_chat_names(session.state_dir)) or "none yet"
        return CommandOutput(one_line(f"saved chats: {names}"))
    path = saved_chats.chat_path(settings.unquoted(argument), session.state_dir)
    chat = saved_chats.load_chat(path)
    session.set_conversation(chat.conversation)
    session.tools.forget_permissions()
    session.set_options(params=chat.params)
    lines = [f"loaded {units.format_count(len(chat.conversation.turns), 'turn')}"]
    if chat.model != session.name:
        lines.append(f"saved with {chat.model}, current model {session.name}: /model switches")
    return CommandOutput(_text(lines), is_new_conversation=True)


def _clear(session: ChatSession, _argument: str, _: OnProgress) -> CommandResult:
    session.set_conversation(session.conversation.cleared())
    session.tools.forget_permissions()
    return CommandOutput(
        "cleared; the system prompt is kept" if session.conversation.system else "cleared",
        is_new_conversation=True,
    )


def _compact(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if argument:
        raise _usage_error("/compact", argument)
    done = session.compact()
    after = session.estimate_used_tokens()
    turns = units.format_count(done.num_turns, "turn")
    text = f"{turns} became a summary: about {after:,} tokens instead of {done.used_tokens:,}"
    if done.num_unread:
        text += f"; without the first {done.num_unread:,}, which did not fit the context"
    if done.is_turn_cut:
        text += "; of the last one it has only the end, as it did not fit the context"
    if done.is_cut:
        text += "; the summary was cut, as it became too long"
    text += "; /undo takes that back"
    return CommandOutput(f"{done.summary}\n\n{text}", is_new_conversation=True)


def _model(session: ChatSession, argument: str, on_progress: OnProgress) -> CommandResult:
    if not argument:
        return CommandOutput(_text(card.name for card in session.client.models()))
    found = session.load(settings.unquoted(argument), on_progress)
    # a remote server may lack the model and report it only at the first request
    notes = (f"note: {note}" for note in found.notes if found.url)
    return CommandOutput(_text((report.model_line(found), *notes)))


def _regen(session: ChatSession, _argument: str, _: OnProgress) -> CommandResult:
    return Regenerate(session.require_regenerable().prompt)


def _fork(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    left = session.branch
    name = session.fork(argument or None)
    return CommandOutput(one_line(f"now in branch {name}; /switch {left} returns"))


def _switch(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if argument:
        session.switch_branch(argument)
    return CommandOutput(_text(_branch_line(session, name) for name in session.branches))


def _branch_line(session: ChatSession, name: str) -> str:
    mark = "*" if name == session.branch else " "
    return f"{mark} {name} · {units.format_count(len(session.branches[name].turns), 'turn')}"


def _undo(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if argument and not argument.isdecimal():
        raise InvalidRequest(f"/undo {argument}: give a number of turns")
    if not argument and session.undo_compact():
        count = units.format_count(len(session.conversation.turns), "turn")
        return CommandOutput(f"the summary is gone, the {count} are back")
    session.set_conversation(session.conversation.undo(int(argument or 1)))
    return CommandOutput(f"{units.format_count(len(session.conversation.turns), 'turn')} left")


def _stats(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if argument == "raw":
        stats = session.client.stats()
        stats.pop("replicas", None)  # of a cluster: the same again
        return CommandOutput(_text(stats_report.all_values(stats)))
    if argument:
        raise InvalidRequest(f"/stats {argument}: give raw, or nothing for a summary")
    return CommandOutput(stats_report.summary(session))


def _mcp(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    action, _space, rest = argument.partition(" ")
    if action == "off" and rest:
        session.tools.remove(rest.strip())
        return CommandOutput(
            one_line(
                f"the tools of {rest.strip()} are not offered any more; "
                "the server runs until localgen ends"
            )
        )
    if rest or action == "off":
        raise _usage_error("/mcp", rest and argument)
    if argument:
        head = [f"{argument} offers:"] if session.tools.add(argument) else []
        return CommandOutput(_text([*head, *mcp_report.server_lines(session.tools, argument)]))
    return CommandOutput(_text(mcp_report.all_server_lines(session.tools)))


def _help(_session: ChatSession, _argument: str, _: OnProgress) -> CommandResult:
    rows = [row for command in SLASH_COMMANDS.values() for row in _help_rows(command)]
    rows += [
        ('"""', "starts and ends a multi-line prompt"),
        ("@FILE @FILE:10-40", "sends the file, or these lines of it, with the prompt"),
        ("Ctrl+C", "stops the answer, clears the line"),
        ("Ctrl+X", "ends the reasoning: the model answers now"),
        ("Ctrl+G", "edits the prompt in $EDITOR"),
        ("Ctrl+D", "leaves the chat"),
    ]
    lines = (f"{left.strip():<{_USAGE_WIDTH}} {right}".rstrip() for left, right in rows)
    return CommandOutput(_text(lines))


def _text(lines: Iterable[str]) -> str:
    """The lines of an output. Escapes newlines in them: a name may have some."""
    return "\n".join(map(one_line, lines))


def _help_rows(command: SlashCommand) -> list[tuple[str, str]]:
    """Usage and help; a usage that is too wide for its column has a row for each of its forms."""
    usage = f"{command.name} {command.usage}"
    if len(usage) <= _USAGE_WIDTH:
        return [(usage, command.help)]
    forms = [f"{command.name} {form}" for form in command.usage.split(" | ")]
    return [(forms[0], command.help), *((form, "") for form in forms[1:])]


def _bye(_session: ChatSession, _argument: str, _: OnProgress) -> CommandResult:
    return LeaveChat()


def _usage_error(name: str, argument: str) -> InvalidRequest:
    usage = f"usage: {name} {SLASH_COMMANDS[name].usage}"
    return InvalidRequest(f"{name} has no {argument!r}; {usage}" if argument else usage)


_COMMANDS = (
    SlashCommand(
        "/set",
        "system TEXT | parameter NAME VALUE | ctx TOKENS | format json|text|SCHEMA|@FILE | "
        "figures on|off | verbose on|off",
        "changes a setting; without a value, shows it",
        _set,
        ("system", "parameter", "ctx", "format", "figures", "verbose"),
    ),
    SlashCommand(
        "/show",
        "info | parameters | template | system",
        "shows the model or the current settings",
        _show,
        ("info", "parameters", "template", "system"),
    ),
    SlashCommand("/save", "[NAME or PATH]", "saves the chat to a file (default name: last)", _save),
    SlashCommand(
        "/load", "[NAME or PATH]", "loads a saved chat; without a name, lists them", _load
    ),
    SlashCommand("/clear", "", "starts a new conversation, keeps the system prompt", _clear),
    SlashCommand("/compact", "", "replaces the turns but the last by a summary", _compact),
    SlashCommand(
        "/model", "[NAME]", "switches to another model; without a name, lists them", _model
    ),
    SlashCommand("/regen", "", "sends the last prompt again", _regen),
    SlashCommand("/fork", "[NAME]", "continues in a copy, keeps this branch unchanged", _fork),
    SlashCommand(
        "/switch", "[NAME]", "switches to another branch; without a name, lists them", _switch
    ),
    SlashCommand("/undo", "[N]", "removes the last turn, or N; takes /compact back", _undo),
    SlashCommand("/stats", "[raw]", "shows speed and memory; raw: all", _stats, ("raw",)),
    SlashCommand("/mcp", "[NAME | off NAME]", "offers the tools of an MCP server, or lists", _mcp),
    SlashCommand("/help", "", "shows this list", _help),
    SlashCommand("/bye", "", "leaves the chat", _bye),
)
SLASH_COMMANDS = {command.name: command for command in _COMMANDS}
