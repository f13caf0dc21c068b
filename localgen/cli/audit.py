"""`localgen audit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag, ModelArgument
from localgen.cli.completion_values import complete_model, complete_session

if TYPE_CHECKING:
    from localgen.audit.scored_text import ContextLimit, Selection
    from localgen.audit.teacher_forcing import ForcedModel
    from localgen.chat.session_store import SessionRecord

_KV_TYPES = ("q8_0", "q4_0")
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="MODEL",
        help="The original, a GGUF file in 16 or 8 bits (default: the one on this machine).",
        autocompletion=complete_model,
    ),
]
KvFlag = Annotated[
    bool,
    typer.Option(
        "--kv", help="Compare the model's KV cache in q8_0 and q4_0 with f16; needs no original."
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option("--text", help="Read this text file instead of stored chats.", dir_okay=False),
]
SessionOption = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="NAME",
        help="Read this stored session only, by name or id.",
        autocompletion=complete_session,
    ),
]
TokensOption = Annotated[
    int, typer.Option("--tokens", metavar="<int>", min=1, help="Compare at most this many tokens.")
]
WorstOption = Annotated[
    int,
    typer.Option("--worst", metavar="<int>", min=0, help="Show this many of the worst places."),
]
CtxOption = Annotated[
    int,
    typer.Option(
        "-c", "--ctx", metavar="<int>", min=16, help="Context size; longer prompts are left out."
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("-t", "--threads", metavar="<int>", min=1, help="Threads (default: all cores)."),
]


def command(
    model: ModelArgument = None,
    reference: ReferenceOption = None,
    kv: KvFlag = False,
    text: TextOption = None,
    session: SessionOption = None,
    tokens: TokensOption = 4000,
    worst: WorstOption = 8,
    ctx: CtxOption = 4096,
    threads: ThreadsOption = None,
    json: JsonFlag = False,
) -> None:
    """Tell how often the 16-bit original would have said another token in your own chats.

    Both models read the stored chats, the latest first, and each answer token by token. Nothing is
    stored, and nothing leaves this machine.
    """
    from localgen.audit.originals import (
        find_original,
        reference_note,
        require_gguf,
        require_memory,
    )
    from localgen.cli.tables import print_notice

    if kv and reference is not None:
        raise InvalidRequest("--kv compares the model with itself: leave --reference out")
    if text is not None and session is not None:
        raise InvalidRequest("--text and --session exclude each other")
    file = require_gguf(model)
    original = None
    if not kv:
        original = require_gguf(reference) if reference else find_original(model or file.name, file)
        if original.path.resolve() == file.path.resolve():
            raise InvalidRequest(
                f"{file.name} and the reference are the same file: name another --reference, or "
                "use --kv"
            )
        if (note := reference_note(original)) is not None:
            print_notice(note)
    require_memory([file] if original is None else [file, original])
    content = None if text is None else _read_text(text)
    records = [] if text is not None else _read_sessions(session)
    with contextlib.ExitStack() as stack:
        audited, *references = [
            (one.name, stack.enter_context(_open_model(one.path, threads)))
            for one in (file, original)
            if one is not None
        ]
        limit = _context_limit([audited, *references], ctx)
        selection = _select(audited[1], content, records, limit, tokens=tokens)
        _run(audited, references, selection, limit, worst=worst, as_json=json)


def _read_text(path: Path) -> str:
    from localgen.chat.parameters import read_text_file

    return read_text_file(path, "--text", "text")


def _read_sessions(wanted: str | None) -> list[SessionRecord]:
    """Stored sessions with turns, the latest first. Raises InvalidRequest if there are none."""
    from localgen.chat.stored_sessions import (
        has_store,
        list_with_turns,
        open_store_or_copy,
        require_session,
    )
    from localgen.config import ServerSettings

    state_dir = ServerSettings.from_environment().state_dir
    records: list[SessionRecord] = []
    if has_store(state_dir):
        with open_store_or_copy(state_dir, _print_copy_notice) as store:
            chosen = list_with_turns(store) if wanted is None else [require_session(store, wanted)]
            records = [store.read(each.id) for each in chosen]
    if any(record.conversation.turns for record in records):
        return records
    if records:
        raise InvalidRequest(
            f"session {wanted!r} has no turns to audit: localgen history lists the others",
            param="session",
        )
    missing = (
        "no stored conversations to audit"
        if wanted is None
        else (f"session {wanted!r} not found: no conversation is stored yet")
    )
    raise InvalidRequest(f"{missing}; chat first (localgen chat), or give a file with --text")


def _print_copy_notice(why: str) -> None:
    from localgen.cli.tables import print_notice

    print_notice(f"{why}: reads a copy")


@contextlib.contextmanager
def _open_model(path: Path, threads: int | None) -> Iterator[ForcedModel]:
    from localgen.audit.teacher_forcing import ForcedModel

    with contextlib.closing(ForcedModel(path, threads, lambda _: None)) as model:
        yield model


def _context_limit(models: Sequence[tuple[str, ForcedModel]], ctx: int) -> ContextLimit:
    """The --ctx option, or the smallest context that a model was trained with."""
    from localgen.audit.scored_text import ContextLimit

    name, model = min(models, key=lambda one: one[1].model.ctx_train)
    if model.model.ctx_train >= ctx:
        return ContextLimit(ctx, "raise --ctx")
    return ContextLimit(
        model.model.ctx_train, f"{name} was trained with no more, so --ctx cannot be raised"
    )


def _select(
    model: ForcedModel,
    text: str | None,
    records: list[SessionRecord],
    limit: ContextLimit,
    *,
    tokens: int,
) -> Selection:
    from localgen.audit.scored_text import select_answers, select_text
    from localgen.audit.templates import load_template

    ctx = limit.tokens
    if text is not None:
        found = select_text(text, model.tokenizer, ctx=ctx, max_scored=tokens)
        empty = "the text has fewer than two tokens"
    else:
        template = load_template(model)
        found = select_answers(records, template, model.tokenizer, ctx=ctx, max_scored=tokens)
        empty = f"no answer fits a context of {ctx:,} tokens: {limit.remedy}"
        if not found.num_too_long:
            empty = "the stored conversations have no answers to audit: give a file with --text"
    if not found.texts:
        raise InvalidRequest(empty)
    return found


def _run(
    audited: tuple[str, ForcedModel],
    references: Sequence[tuple[str, ForcedModel]],
    selection: Selection,
    limit: ContextLimit,
    *,
    worst: int,
    as_json: bool,
) -> None:
    """references: the original; none to compare KV types."""
    from localgen.audit.audit import REFERENCE_KV, Audit, Side, require_same_vocabulary
    from localgen.cli.audit_report import AuditPrinter

    name, model = audited
    if references:
        reference, sides = Side(*references[0]), [Side(name, model)]
        require_same_vocabulary(sides[0], reference)
    else:
        reference = Side(f"{name}, KV {REFERENCE_KV}", model)
        sides = [Side(f"{name}, KV {kind}", model, kind) for kind in _KV_TYPES]
    printer = AuditPrinter(reference.name, selection, limit, model.tokenizer, as_json=as_json)
    with contextlib.closing(Audit(reference, sides, selection.longest, worst)) as audit:
        printer.print_estimate(audit.estimate_s(selection))
        with printer:
            audit.run(selection, printer.update)
        printer.print_result(audit.tallies)
