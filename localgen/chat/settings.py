"""Settings of a chat by name: the system prompt, sampling, context, format; shown and changed."""

from __future__ import annotations

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import ANY_JSON_OBJECT, BASE_SAMPLING, SamplingParams
from localgen.backends.terminal_text import one_line
from localgen.chat import parameters
from localgen.chat.session import ChatSession

_ON_OFF = ("on", "off")
# values of each setting, for completion
SETTING_VALUES = {
    "parameter": parameters.PARAMETER_NAMES,
    "system": ("default",),
    "ctx": ("default",),
    "format": ("json", "text"),
    "figures": _ON_OFF,
    "verbose": _ON_OFF,
}


def change_setting(session: ChatSession, argument: str) -> str | None:
    """Change a setting and return what it is now; without a value, only that.

    argument: `NAME`, or `NAME VALUE`. Returns None if there is no such setting; raises
    InvalidRequest if the value is invalid.
    """
    what, _space, typed = argument.partition(" ")
    typed = typed.strip()
    text = unquoted(typed)
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
    return None


def _set_system(session: ChatSession, typed: str) -> str:
    if not typed:
        own = session.conversation.system
        hint = "\n(/set system default removes it)" if own else ""
        return f"{system_text(session)}{hint}"
    # quotes make such a word a prompt
    text = "" if typed in parameters.UNSET_WORDS else unquoted(typed)
    session.set_conversation(session.conversation.with_system(text))
    if text:
        return "system prompt set"
    rest = f"; that of the preset {session.name} applies" if session.system else ""
    return one_line(f"system prompt removed{rest}")


def system_text(session: ChatSession) -> str:
    """The system prompt, and whether it is that of a preset."""
    own, system = session.conversation.system, session.system
    source = "" if own or not system else f"\n(of the preset {session.name})"
    return f"{system}{source}" if system else "no system prompt"


def _set_switch(session: ChatSession, what: str, text: str) -> str:
    """`figures` or `verbose`; as in Ollama, on without a value."""
    if text not in ("", *_ON_OFF):
        raise InvalidRequest(f"{what} {text!r}: give on or off")
    session.set_options(**{what: text != "off"})
    return f"{what} {text or 'on'}"


def _set_parameter(session: ChatSession, text: str) -> str:
    name, _, value = text.partition(" ")
    if not name:
        return parameters_text(session)
    field = parameters.resolve_parameter_name(name)
    if value.strip():
        session.set_parameter(name, value.strip())
    values = {row: value for row, value, _ in effective_parameter_rows(session)}
    return one_line(f"{name} = {values[field]}")


def _set_format(session: ChatSession, text: str) -> str:
    if not text:
        schema = session.options.params.json_schema
        kind = "json" if schema == ANY_JSON_OBJECT else schema or "text"
        return f"format {kind}"
    is_text = text in ("text", *parameters.UNSET_WORDS)
    schema = "default" if is_text else parameters.parse_format(text, "format")
    session.set_parameter("json_schema", schema)
    return f"format {'text' if is_text else text}"


def effective_parameter_rows(session: ChatSession) -> list[tuple[str, str, str]]:
    """Name, effective value and source of each sampling parameter of a session."""
    # those of a remote server, and of a model that is not loaded yet, are unknown
    known = session.model_info
    base = BASE_SAMPLING if known is not None and not session.is_remote else SamplingParams()
    defaults = SamplingParams() if known is None else known.sampling
    preset = session.preset
    of_preset = SamplingParams() if preset is None else preset.params
    return parameters.effective_parameters(session.options.params, of_preset, defaults, base)


def _set_ctx(session: ChatSession, text: str) -> str:
    if text:
        set_ctx(session, text)
    info, ctx = session.model_info, session.ctx
    shown = f"context {ctx:,} tokens" if ctx else "context of the model"
    if info and (ctx or 0) > info.ctx:
        shown += ": the next prompt loads the model again"
    elif ctx and (used := session.estimate_used_tokens()) >= ctx:
        shown += f": the conversation has {used:,}, /compact or /undo make room for the next prompt"
    return shown


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


def parameters_text(session: ChatSession) -> str:
    """All sampling parameters with their values and sources, a line each."""
    rows = effective_parameter_rows(session)
    lines = (f"{name:<22} {value:<16} {origin}".rstrip() for name, value, origin in rows)
    return "\n".join(map(one_line, lines))


def unquoted(text: str) -> str:
    """The text without the quotes around it."""
    for quote in ('"""', '"'):
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)].strip()
    return text
