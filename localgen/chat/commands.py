"""The slash commands: what each takes, does and says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localgen.backends import units
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import DraftInfo, ModelInfo
from localgen.backends.types import BASE_SAMPLING, SamplingParams
from localgen.chat import parameters, report, saved_chats
from localgen.chat.session import Progress, Session

ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}


@dataclass(frozen=True, slots=True)
class Say:
    """Lines for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to send now, as if it had been typed."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The end of the chat."""


Outcome = Say | Ask | Leave


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command. choices: first words it takes, for completion."""

    name: str
    usage: str
    help: str
    run: Callable[[Session, str, Progress], Outcome]
    choices: tuple[str, ...] = ()


def is_command(line: str) -> bool:
    """Whether a line is a command: `/word`. `/usr/bin` and lines that start blank are prompts."""
    word = line.split(maxsplit=1)[0] if line.strip() else ""
    return line.startswith("/") and word.count("/") == 1 and len(word) > 1


def run(session: Session, line: str, on_progress: Progress) -> Outcome:
    """Carry out a command line. LocalgenError: it cannot be, and nothing has changed."""
    word, _, argument = line.strip().partition(" ")
    return find(word).run(session, argument.strip(), on_progress)


def needs_model(line: str) -> bool:
    """Whether a command asks about the model itself, which then has to be loaded."""
    return line.split() in (["/show"], ["/show", "info"], ["/show", "template"]) or line.startswith(
        "/set ctx"
    )


def find(word: str) -> Command:
    """The command of a word with its slash. InvalidRequest offers the closest."""
    name = ALIASES.get(word, word)
    if name in COMMANDS:
        return COMMANDS[name]
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see /help"
    raise InvalidRequest(f"no command {word}: {hint} (a leading space sends it as a prompt)")


def _set(session: Session, argument: str, _: Progress) -> Outcome:
    what, _space, rest = argument.partition(" ")
    rest = _unquoted(rest.strip())
    if what == "system":
        session.change(session.conversation.with_system(rest))
        return Say("system prompt set" if rest else "no system prompt")
    if what == "parameter":
        return _set_parameter(session, rest)
    if what == "ctx":
        return _set_ctx(session, rest)
    if what == "verbose" and rest in ("", "on", "off"):
        session.set(verbose=rest != "off")
        return Say(f"verbose {'on' if session.options.verbose else 'off'}")
    raise InvalidRequest(f"/set {argument}: give {COMMANDS['/set'].usage}")


def _set_parameter(session: Session, rest: str) -> Outcome:
    name, _, text = rest.partition(" ")
    if not name or not text.strip():
        raise InvalidRequest("/set parameter: give a name and a value, or default for the value")
    session.set_parameter(name, text.strip())
    field = parameters.field_name(name)
    rows = parameter_rows(session)
    return Say(next(f"{row} = {value}" for row, value, _ in rows if row == field))


def parameter_rows(session: Session) -> list[tuple[str, str, str]]:
    """Name, value in force and whose it is, of each sampling parameter of a session."""
    # another server has defaults of its own, which it does not tell
    known = session.info
    base = SamplingParams() if session.is_elsewhere else BASE_SAMPLING
    usual = SamplingParams() if known is None else known.sampling
    return parameters.rows(session.options.params, usual, base)


def _set_ctx(session: Session, text: str) -> Outcome:
    session.set(ctx=ctx_of(session, text))
    return Say(f"context {session.options.ctx or session.model.ctx:,} tokens")


def ctx_of(session: Session, text: str) -> int | None:
    """The context in tokens that a user asks for; None: as large as the model has.

    InvalidRequest: no such number, more than is loaded, or not ours to say.
    """
    info = session.info
    if session.is_elsewhere:
        raise InvalidRequest("ctx: this model is on another server, which settles its context")
    if text == "default":
        return None
    # a number of many digits would take its time, and there is no such context
    if not (text.isdecimal() and len(text) < 12 and int(text) > 0):
        raise InvalidRequest(f"ctx {text}: give a number of tokens, or default")
    if info is not None and int(text) > info.ctx:
        raise InvalidRequest(f"ctx {int(text):,}: {info.name} is loaded with {info.ctx:,}")
    return int(text)


def _show(session: Session, argument: str, _: Progress) -> Outcome:
    what = argument or "info"
    if what == "info":
        return Say(_info(session))
    if what == "parameters":
        rows = parameter_rows(session)
        lines = (f"{name:<22} {value:<16} {whose}".rstrip() for name, value, whose in rows)
        return Say("\n".join(lines))
    if what == "template":
        if session.model.url:
            return Say("the model is on another server, which does not tell its chat template")
        return Say(session.model.chat_template or "the model has no chat template")
    if what == "system":
        return Say(session.conversation.system or "no system prompt")
    raise InvalidRequest(f"/show {what}: give {COMMANDS['/show'].usage}")


def _info(session: Session) -> str:
    info = session.model
    if info.url:
        return _info_elsewhere(session)
    ctx = session.options.ctx or info.ctx
    rows = [
        ("model", info.name),
        ("file", info.path),
        ("kind", f"{info.architecture} · {info.description} · {info.params / 1e6:,.1f}M params"),
        ("size", f"{units.size(info.size_bytes)} · context memory {units.size(info.kv_bytes)}"),
        ("context", f"{ctx:,} in use · {info.ctx:,} loaded · {info.ctx_train:,} trained"),
        ("runs on", " · ".join(_runs_on(info))),
        *((("drafts", _drafts(info.draft)),) if info.draft else ()),
        ("branch", f"{session.branch} · {units.count(len(session.conversation.turns), 'turn')}"),
        *(("note", note) for note in info.notes),
    ]
    return "\n".join(f"{name:<9} {value}" for name, value in rows)


def _info_elsewhere(session: Session) -> str:
    info = session.model
    rows = [
        ("model", info.name),
        ("server", info.url),
        *((("context", f"{info.ctx:,}"),) if info.ctx else ()),
        ("branch", f"{session.branch} · {units.count(len(session.conversation.turns), 'turn')}"),
        *(("note", note) for note in info.notes),
    ]
    return "\n".join(f"{name:<9} {value}" for name, value in rows)


def _drafts(draft: DraftInfo) -> str:
    sizes = f"{units.size(draft.size_bytes)} · context memory {units.size(draft.kv_bytes)}"
    return f"{draft.name} · {draft.description} · {sizes}"


def _runs_on(info: ModelInfo) -> Iterator[str]:
    yield info.backend
    yield info.processor
    if info.options.threads is not None:
        yield units.count(info.options.threads, "thread")
    if info.backend_reason:
        yield info.backend_reason


def _save(session: Session, argument: str, _: Progress) -> Outcome:
    path = saved_chats.chat_path(_unquoted(argument) or "last", session.state_dir)
    chat = saved_chats.SavedChat(session.name, session.options.params, session.conversation)
    saved_chats.save(path, chat)
    return Say(f"saved {units.count(len(session.conversation.turns), 'turn')} to {path}")


def _load(session: Session, argument: str, _: Progress) -> Outcome:
    if not argument:
        names = ", ".join(saved_chats.names(session.state_dir)) or "none yet"
        return Say(f"saved chats: {names}")
    chat = saved_chats.load(saved_chats.chat_path(_unquoted(argument), session.state_dir))
    session.change(chat.conversation)
    session.set(params=chat.params)
    lines = [f"loaded {units.count(len(chat.conversation.turns), 'turn')}"]
    if chat.model != session.name:
        lines.append(f"held with {chat.model}, this is {session.name}: /model changes that")
    return Say("\n".join(lines))


def _clear(session: Session, _argument: str, _: Progress) -> Outcome:
    session.change(session.conversation.cleared())
    return Say("cleared; the system prompt stays" if session.conversation.system else "cleared")


def _model(session: Session, argument: str, on_progress: Progress) -> Outcome:
    if not argument:
        return Say("\n".join(card.name for card in session.client.models()))
    found = session.load(_unquoted(argument), on_progress)
    # another server may not have it, and says so only when it is asked something
    notes = (f"note: {note}" for note in found.notes if found.url)
    return Say("\n".join((report.model_line(found), *notes)))


def _regen(session: Session, _argument: str, _: Progress) -> Outcome:
    if not session.conversation.turns:
        raise InvalidRequest("/regen: nothing has been asked yet")
    prompt = session.conversation.turns[-1].prompt
    session.change(session.conversation.undo())
    return Ask(prompt)


def _fork(session: Session, argument: str, _: Progress) -> Outcome:
    left = session.branch
    name = session.fork(argument or None)
    return Say(f"now in branch {name}; /switch {left} goes back")


def _switch(session: Session, argument: str, _: Progress) -> Outcome:
    if argument:
        session.switch(argument)
    return Say("\n".join(_branch_line(session, name) for name in session.branches))


def _branch_line(session: Session, name: str) -> str:
    mark = "*" if name == session.branch else " "
    return f"{mark} {name} · {units.count(len(session.branches[name].turns), 'turn')}"


def _undo(session: Session, argument: str, _: Progress) -> Outcome:
    if argument and not argument.isdecimal():
        raise InvalidRequest(f"/undo {argument}: give a number of turns")
    session.change(session.conversation.undo(int(argument or 1)))
    return Say(f"{units.count(len(session.conversation.turns), 'turn')} left")


def _stats(session: Session, _argument: str, _: Progress) -> Outcome:
    return Say("\n".join(_flat(session.client.stats(), "")))


def _flat(found: object, name: str) -> list[str]:
    if isinstance(found, dict):
        # what a model is does not change: /show info has it
        keys = [key for key in found if key != "info"]
        inner = [(f"{name}.{key}" if name else str(key), found[key]) for key in keys]
        return [line for key, value in inner for line in _flat(value, key)]
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return [line for at, value in enumerate(found) for line in _flat(value, f"{name}[{at}]")]
    shown = f"{found:.1f}" if isinstance(found, float) else str(found)
    return [f"{name:<44} {shown}"]


def _help(_session: Session, _argument: str, _: Progress) -> Outcome:
    rows = [(command.name + " " + command.usage, command.help) for command in COMMANDS.values()]
    rows += [
        ('"""', "opens and closes a prompt of several lines"),
        ("Ctrl+C", "stops the answer, clears the line"),
        ("Ctrl+G", "opens the prompt in $EDITOR"),
        ("Ctrl+D", "leaves"),
    ]
    return Say("\n".join(f"{left.strip():<48} {right}" for left, right in rows))


def _bye(_session: Session, _argument: str, _: Progress) -> Outcome:
    return Leave()


def _unquoted(text: str) -> str:
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)].strip()
    return text


_TABLE = (
    Command(
        "/set",
        "system TEXT | parameter NAME VALUE | ctx TOKENS | verbose on|off",
        "changes a setting of this chat",
        _set,
        ("system", "parameter", "ctx", "verbose"),
    ),
    Command(
        "/show",
        "info | parameters | template | system",
        "shows what is in force",
        _show,
        ("info", "parameters", "template", "system"),
    ),
    Command("/save", "[NAME or PATH]", "saves the conversation (`last` without a name)", _save),
    Command("/load", "[NAME or PATH]", "loads one; lists them without a name", _load),
    Command("/clear", "", "forgets the conversation, keeps the system prompt", _clear),
    Command("/model", "[NAME]", "goes on with another model; lists them without a name", _model),
    Command("/regen", "", "asks the last prompt again", _regen),
    Command("/fork", "[NAME]", "goes on in a copy, keeps this conversation as it is", _fork),
    Command("/switch", "[NAME]", "changes between forks; lists them without a name", _switch),
    Command("/undo", "[N]", "takes back the last turn, or the last N", _undo),
    Command("/stats", "", "what the server and its engines are doing", _stats),
    Command("/help", "", "this list", _help),
    Command("/bye", "", "leaves", _bye),
)
COMMANDS = {command.name: command for command in _TABLE}
