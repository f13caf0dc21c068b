"""The slash commands of a chat: parsing, execution and output."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from localgen.backends import units
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DraftInfo, ModelInfo
from localgen.backends.sampling_params import ANY_JSON_OBJECT, BASE_SAMPLING, SamplingParams
from localgen.backends.terminal_text import collapse, one_line
from localgen.chat import parameters, report, saved_chats, stats_report
from localgen.chat.session import ChatSession, OnProgress
from localgen.mcp_tools.chat_tools import OfferedTool
from localgen.mcp_tools.server_file import read_servers

_USAGE_WIDTH = 25  # leaves room for the help in 80 columns
_TOOL_CHARS = 120
_ON_OFF = ("on", "off")
_SET_VALUES = {
    "parameter": parameters.PARAMETER_NAMES,
    "system": ("default",),
    "ctx": ("default",),
    "format": ("json", "text"),
    "figures": _ON_OFF,
    "verbose": _ON_OFF,
}
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


def argument_choices(word: str, before: str) -> tuple[str, ...]:
    """Completions of the next argument of a command. before: the arguments that precede it."""
    if word == "/set" and before:
        return _SET_VALUES.get(before, ())
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
    """Change a setting; without a value, show it."""
    what, _space, typed = argument.partition(" ")
    typed = typed.strip()
    text = _strip_quotes(typed)
    match what:
        case "system":
            return _set_system(session, typed)
        case "parameter":
            return _set_parameter(session, text)
        case "ctx":
            return _set_ctx(session, text)
        case "format":
            return _set_format(session, text)
        case "figures" | "verbose":
            return _set_switch(session, what, text)
    if parameters.is_parameter_name(what):
        return _set_parameter(session, argument)
    raise _usage_error("/set", argument)


def _set_system(session: ChatSession, typed: str) -> CommandResult:
    if not typed:
        own = session.conversation.system
        hint = "\n(/set system default removes it)" if own else ""
        return CommandOutput(f"{_system_text(session)}{hint}")
    # quotes make such a word a prompt
    text = "" if typed in parameters.UNSET_WORDS else _strip_quotes(typed)
    session.set_conversation(session.conversation.with_system(text))
    if text:
        return CommandOutput("system prompt set")
    rest = f"; that of the preset {session.name} applies" if session.system else ""
    return CommandOutput(one_line(f"system prompt removed{rest}"))


def _system_text(session: ChatSession) -> str:
    own, system = session.conversation.system, session.system
    source = "" if own or not system else f"\n(of the preset {session.name})"
    return f"{system}{source}" if system else "no system prompt"


def _set_switch(session: ChatSession, what: str, text: str) -> CommandResult:
    """`figures` or `verbose`; as in Ollama, on without a value."""
    if text not in ("", *_ON_OFF):
        raise InvalidRequest(f"{what} {text!r}: give on or off")
    session.set_options(**{what: text != "off"})
    return CommandOutput(f"{what} {text or 'on'}")


def _set_parameter(session: ChatSession, text: str) -> CommandResult:
    name, _, value = text.partition(" ")
    if not name:
        return CommandOutput(_parameters_text(session))
    field = parameters.resolve_parameter_name(name)
    if value.strip():
        session.set_parameter(name, value.strip())
    values = {row: value for row, value, _ in effective_parameter_rows(session)}
    return CommandOutput(one_line(f"{name} = {values[field]}"))


def _set_format(session: ChatSession, text: str) -> CommandResult:
    if not text:
        schema = session.options.params.json_schema
        kind = "json" if schema == ANY_JSON_OBJECT else schema or "text"
        return CommandOutput(f"format {kind}")
    is_text = text in ("text", *parameters.UNSET_WORDS)
    schema = "default" if is_text else parameters.parse_format(text, "format")
    session.set_parameter("json_schema", schema)
    return CommandOutput(f"format {'text' if is_text else text}")


def effective_parameter_rows(session: ChatSession) -> list[tuple[str, str, str]]:
    """Name, effective value and source of each sampling parameter of a session."""
    # those of a remote server, and of a model that is not loaded yet, are unknown
    known = session.model_info
    base = BASE_SAMPLING if known is not None and not session.is_remote else SamplingParams()
    defaults = SamplingParams() if known is None else known.sampling
    preset = session.preset
    of_preset = SamplingParams() if preset is None else preset.params
    return parameters.effective_parameters(session.options.params, of_preset, defaults, base)


def _set_ctx(session: ChatSession, text: str) -> CommandResult:
    if text:
        set_ctx(session, text)
    info, ctx = session.model_info, session.ctx
    shown = f"context {ctx:,} tokens" if ctx else "context of the model"
    if info and (ctx or 0) > info.ctx:
        shown += ": the next prompt loads the model again"
    elif ctx and (used := session.estimate_used_tokens()) >= ctx:
        shown += f": the conversation has {used:,}, /compact or /undo make room for the next prompt"
    return CommandOutput(shown)


def set_ctx(session: ChatSession, text: str) -> None:
    """Set the context length in tokens; `default` is the context of the model.

    The next prompt loads the model again if that is more than it has. Raises InvalidRequest if it
    is not a number, exceeds the trained context, or the model is on a remote server.
    """
    info = session.model_info
    if session.is_remote:
        raise InvalidRequest("ctx: this model is on a remote server, which sets its own context")
    # limit the digits: converting a very long number is slow
    if text != "default" and not (text.isdecimal() and len(text) < 12 and int(text) > 0):
        raise InvalidRequest(f"ctx {text!r}: give a number of tokens, or default")
    ctx = None if text == "default" else int(text)
    if info is not None and ctx is not None and ctx > max(info.ctx, info.ctx_train):
        raise InvalidRequest(f"ctx {ctx:,}: {info.name} was trained for {info.ctx_train:,}")
    session.set_options(ctx=ctx)


def _show(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    what = argument or "info"
    if what == "info":
        return CommandOutput(_model_info_text(session))
    if what == "parameters":
        return CommandOutput(_parameters_text(session))
    if what == "template":
        if session.model.url:
            return CommandOutput(
                "the model is on a remote server, which does not report its chat template"
            )
        return CommandOutput(session.model.chat_template or "the model has no chat template")
    if what == "system":
        return CommandOutput(_system_text(session))
    raise _usage_error("/show", argument)


def _parameters_text(session: ChatSession) -> str:
    rows = effective_parameter_rows(session)
    return _text(f"{name:<22} {value:<16} {origin}".rstrip() for name, value, origin in rows)


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
        (
            "branch",
            f"{session.branch} · {units.format_count(len(session.conversation.turns), 'turn')}",
        ),
        *(("note", note) for note in info.notes),
    ]
    return _text(f"{name:<9} {value}" for name, value in rows)


def _remote_info_text(session: ChatSession) -> str:
    info = session.model
    rows = [
        ("model", info.name),
        ("server", info.url),
        *((("context", f"{info.ctx:,}"),) if info.ctx else ()),
        (
            "branch",
            f"{session.branch} · {units.format_count(len(session.conversation.turns), 'turn')}",
        ),
        *(("note", note) for note in info.notes),
    ]
    return _text(f"{name:<9} {value}" for name, value in rows)


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
    path = saved_chats.chat_path(_strip_quotes(argument) or "last", session.state_dir)
    chat = saved_chats.SavedChat(session.name, session.options.params, session.conversation)
    saved_chats.create_chats_dir(session.state_dir)
    saved_chats.save_chat(path, chat)
    count = units.format_count(len(session.conversation.turns), "turn")
    return CommandOutput(one_line(f"saved {count} to {path}"))


def _load(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    if not argument:
        names = ", ".join(saved_chats.saved_chat_names(session.state_dir)) or "none yet"
        return CommandOutput(one_line(f"saved chats: {names}"))
    chat = saved_chats.load_chat(saved_chats.chat_path(_strip_quotes(argument), session.state_dir))
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
    found = session.load(_strip_quotes(argument), on_progress)
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
        return CommandOutput(_text(stats_report.all_values(session.client.stats())))
    if argument:
        raise InvalidRequest(f"/stats {argument}: give raw, or nothing for a summary")
    return CommandOutput(stats_report.summary(session))


def _mcp(session: ChatSession, argument: str, _: OnProgress) -> CommandResult:
    action, _space, rest = argument.partition(" ")
    if action == "off" and rest:
        session.tools.remove(rest.strip())
        return CommandOutput(one_line(f"the tools of {rest.strip()} are not offered any more"))
    if rest:
        raise _usage_error("/mcp", argument)
    if argument:
        lines = _tool_lines(session, session.tools.add(argument))
        return CommandOutput(_text((f"{argument} offers:", *lines)))
    in_use = session.tools.servers
    lines = [line for offered in in_use.values() for line in _tool_lines(session, offered)]
    unused = [name for name in read_servers() if name not in in_use]
    if unused:
        lines.append(f"not in use: {', '.join(unused)}; /mcp NAME offers the tools of one")
    return CommandOutput(_text(lines or ["no MCP servers: localgen mcp add"]))


def _tool_lines(session: ChatSession, offered: Iterable[OfferedTool]) -> list[str]:
    """A line of each tool; one that runs without a question is marked."""
    lines = []
    for each in offered:
        mark = "" if session.tools.asks_before(each) else " (runs without a question)"
        line = f"{each.title}{mark}: {collapse(each.tool.description)}"
        lines.append(line if len(line) <= _TOOL_CHARS else f"{line[: _TOOL_CHARS - 1]}…")
    return lines


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


def _strip_quotes(text: str) -> str:
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)].strip()
    return text


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
