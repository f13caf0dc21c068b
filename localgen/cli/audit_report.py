"""Terminal output of `localgen audit`: progress on stderr, figures and worst places on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import TracebackType

import typer

from localgen.audit.comparison import Agreement, Flip, Tally
from localgen.audit.scored_text import ContextLimit, Selection
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count, format_elapsed
from localgen.cli import tables
from localgen.cli.quantize_report import StepProgress
from localgen.quant.request.losses import Interval

# characters of the text before a flip that are shown
_CONTEXT_CHARS = 60


class AuditPrinter:
    """Prints one audit; a context manager that shows progress.

    reference: its name. tokenizer: of the audited model.
    """

    def __init__(
        self,
        reference: str,
        selection: Selection,
        limit: ContextLimit,
        tokenizer: LlamaCppTokenizer,
        *,
        as_json: bool,
    ) -> None:
        self._reference, self._selection, self._limit = reference, selection, limit
        self._tokenizer, self._as_json = tokenizer, as_json
        self._progress: StepProgress | None = None

    def print_estimate(self, seconds: float) -> None:
        chosen = self._selection
        texts = format_count(len(chosen.texts), "text")
        tables.print_notice(
            f"compares {chosen.num_scored:,} tokens of {texts} with {self._reference}: "
            f"about {format_elapsed(seconds)}, nothing is stored"
        )
        if chosen.num_too_long:
            answers = format_count(chosen.num_too_long, "answer")
            limit = self._limit
            tables.print_notice(
                f"{answers} left out, longer than {limit.tokens:,} tokens: {limit.remedy}"
            )

    def __enter__(self) -> AuditPrinter:
        self._progress = StepProgress()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, done: int) -> None:
        if self._progress is not None:
            self._progress.update("comparing", done, self._selection.num_scored, "tokens")

    def print_result(self, tallies: Sequence[Tally]) -> None:
        found = [(tally.agreement(), tally.worst) for tally in tallies]
        if self._as_json:
            typer.echo(tables.json_text(self._record(found), indent=2))
            return
        head = ("MODEL", "TOKENS", "OTHER TOKEN, %", "KL, NATS")
        rows = [_cells(agreement) for agreement, _ in found]
        for line in tables.align_columns([head, *rows]):
            typer.echo(line)
        if found[0][0].flips_interval is None:
            texts = format_count(found[0][0].texts, "text")
            tables.print_notice(f"{texts}: too few for 95 % intervals, which need 8")
        for agreement, worst in found:
            for line in self._worst_lines(agreement, worst):
                typer.echo(one_line(line))

    def _record(self, found: Iterable[tuple[Agreement, list[Flip]]]) -> dict[str, object]:
        return {
            "reference": self._reference,
            "left_out": self._selection.num_too_long,
            "sides": [
                asdict(agreement) | {"worst": [self._flip_record(flip) for flip in worst]}
                for agreement, worst in found
            ],
        }

    def _flip_record(self, flip: Flip) -> dict[str, object]:
        record: dict[str, object] = asdict(flip)
        record["context"] = self._text(flip.tokens)
        for name in ("actual", "ours", "theirs"):
            record[name] = self._text([getattr(flip, name)])
        del record["tokens"]
        return record

    def _worst_lines(self, agreement: Agreement, worst: Sequence[Flip]) -> Iterable[str]:
        if not worst:
            return
        yield ""
        yield f"Where {agreement.side} differs most from {self._reference}:"
        for flip in worst:
            before = self._text(flip.tokens)[-_CONTEXT_CHARS:]
            ours, theirs = self._text([flip.ours]), self._text([flip.theirs])
            yield f"  {flip.text}, KL {flip.kl:.2f}: …{before}▸"
            yield (
                f"    says {ours!r} ({flip.ours_by_audited:.0%}; the reference "
                f"{flip.ours_by_reference:.0%}), the reference {theirs!r} "
                f"({flip.theirs_by_reference:.0%}; here {flip.theirs_by_audited:.0%})"
            )

    def _text(self, tokens: Sequence[int]) -> str:
        """Text of tokens; special ones by name."""
        pieces = (
            self._tokenizer.piece(token) or self._tokenizer.id_to_token(token) for token in tokens
        )
        return b"".join(pieces).decode("utf-8", "replace")


def _cells(one: Agreement) -> tuple[str, ...]:
    return (
        one.side,
        f"{one.tokens:,}",
        f"{100 * one.flips:.2f}{_bounds(one.flips_interval, 100, 2)}",
        f"{one.kl:.4f}{_bounds(one.kl_interval, 1, 4)}",
    )


def _bounds(interval: Interval | None, factor: float, digits: int) -> str:
    if interval is None:
        return ""
    low, high = factor * interval.low, factor * interval.high
    return f" ({low:.{digits}f} to {high:.{digits}f})"
