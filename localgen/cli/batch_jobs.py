"""`localgen run --batch`: validate, resume, progress, and what is left at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count, format_elapsed
from localgen.batch.lines import BatchLine, LineProblem, read_batch, read_first_line
from localgen.chat.parameters import ModelOptions
from localgen.cli.options import REQUEST_OPTIONS, SAMPLING_OPTIONS
from localgen.cli.remote_options import create_client, is_from_command_line

if TYPE_CHECKING:
    from localgen.backends.model_info import ModelInfo
    from localgen.batch.results import ResultFile
    from localgen.batch.run import Progress
    from localgen.client import Client
    from localgen.client.endpoints import Endpoint

_PANEL = "Batch"
BatchOption = Annotated[
    Path | None,
    typer.Option(
        "--batch",
        help="Answer the requests of a file in OpenAI's batch format, in the background; "
        "needs --out.",
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Where the results of --batch go; the same command resumes.",
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        help="Requests of --batch at once (default: 8; on a GPU 64).",
        metavar="N",
        min=1,
        max=512,
        rich_help_panel=_PANEL,
    ),
]
_CPU_CONCURRENCY, _GPU_CONCURRENCY = 8, 64
# below 0: the engine computes them in the background
_PRIORITY = -1
_SHOWN_PROBLEMS = 10
_LINE_INTERVAL_S = 30.0
_LINES_PER_NOTE = 1000
# of a file that takes seconds to validate
_LARGE_BYTES = 4_000_000


def require_no_prompt_options(context: typer.Context, given: Mapping[str, object]) -> None:
    """Raise InvalidRequest for what is not for a batch. given: values by the name of the option."""
    for name, value in given.items():
        if value:
            raise InvalidRequest(f"{name} does not apply to --batch: leave it out")
    allowed = ("keep_alive", "priority")
    for flag in (*REQUEST_OPTIONS, *SAMPLING_OPTIONS):
        if flag.field not in allowed and is_from_command_line(context, flag.field):
            raise InvalidRequest(
                f"{flag.long_name} does not apply to --batch: set it in the body of each line, "
                "or give a preset as the model"
            )


def run_batch(
    batch: Path,
    out: Path | None,
    model: str | None,
    options: ModelOptions,
    endpoint: Endpoint | None,
    concurrency: int | None,
    *,
    has_priority: bool,
) -> None:
    """Answer all requests that have no result yet. Raises InvalidRequest before the first one.

    has_priority: that of the options is for this batch, not from a variable for prompts.
    """
    if out is None:
        raise InvalidRequest("--batch needs --out FILE for the results")
    if batch.exists() and out.exists() and batch.samefile(out):
        raise InvalidRequest("--out must not be the file of --batch")
    if not has_priority:
        options = replace(options, priority=_PRIORITY)
    job = _Job(batch, options, endpoint, concurrency)
    first = read_first_line(batch)
    if first is not None and endpoint is None:
        _require_model(batch, first, model)
    # does it fit? A run that resumes may have no requests left
    if first is not None and batch.stat().st_size > _LARGE_BYTES and not out.exists():
        job.load(model or first.model)
    lines = _validated_lines(batch, model, is_local=endpoint is None)
    from localgen.batch.results import ResultFile

    with ResultFile.opened(out, {line.custom_id for line in lines}) as results:
        left = [line for line in lines if line.custom_id not in results.done]
        if results.done:
            _say(f"{out} has {len(results.done):,} of {len(lines):,} results: {len(left):,} left")
        try:
            for name, group in _by_model(left, model).items():
                job.run(name, group, results, len(lines), replaces=model is not None)
        except KeyboardInterrupt:
            done = len(results.done)
            _say(f"stopped: {done:,} of {len(lines):,} are done, the same command resumes")
            raise
        _report(out, results, len(lines))


def _validated_lines(path: Path, model: str | None, *, is_local: bool) -> list[BatchLine]:
    """The lines of the file. Raises the error of the first model that is not installed."""
    found: set[str | None] = set()
    progress = _ProgressLine()

    def on_line(line: BatchLine) -> None:
        if line.number % _LINES_PER_NOTE == 1:
            progress.show(f"reading {path}: {format_count(line.number - 1, 'line')}")
        if is_local and (name := model or line.model) not in found:
            _require_model(path, line, model)
            found.add(name)

    def accept(url: str, body: dict[str, Any]) -> None:
        """Another server has a schema of its own."""

    validate = accept
    if is_local:
        from localgen.batch.schema import validate_body as validate
    with progress:
        lines, problems = read_batch(path, validate, on_line)
    if problems:
        _print_problems(path, problems)
        bad, total = len(problems), len(lines) + len(problems)
        raise InvalidRequest(
            f"{path}: {bad:,} of {format_count(total, 'line')} {'is' if bad == 1 else 'are'} "
            "invalid, so nothing was computed: correct them"
        )
    if not lines:
        raise InvalidRequest(f"{path} has no requests")
    return lines


def _require_model(path: Path, line: BatchLine, model: str | None) -> None:
    """Raise the error of a model that is not installed. model: replaces that of the line."""
    from localgen.hub.resolve import resolve_model

    try:
        resolve_model(model or line.model)
    except LocalgenError as error:
        place = "" if model is not None else f"{path}: line {line.number}: "
        raise type(error)(f"{place}{error.message}", param=error.param) from error


def _print_problems(path: Path, problems: list[LineProblem]) -> None:
    for problem in problems[:_SHOWN_PROBLEMS]:
        _say(f"{path}: line {problem.number}: {problem.reason}")
    if len(problems) > _SHOWN_PROBLEMS:
        _say(f"and {len(problems) - _SHOWN_PROBLEMS:,} more")


def _by_model(lines: list[BatchLine], model: str | None) -> dict[str | None, list[BatchLine]]:
    """The lines of each model, so that each one is loaded once."""
    groups: dict[str | None, list[BatchLine]] = {}
    for line in lines:
        groups.setdefault(model or line.model, []).append(line)
    return groups


class _Job:
    """Runs the lines of one model after those of another."""

    def __init__(
        self,
        batch: Path,
        options: ModelOptions,
        endpoint: Endpoint | None,
        concurrency: int | None,
    ) -> None:
        self._batch, self._options = batch, options
        self._endpoint, self._concurrency = endpoint, concurrency

    def load(self, model: str | None) -> ModelInfo:
        """Load a model, unless it is loaded. Raises the errors of Client.load."""
        from localgen.chat.report import loading_text
        from localgen.hub.packaged import default_model

        name = model or default_model()
        with _ProgressLine() as line, closing(self._create_client()) as client:
            line.show(f"loading {name}")
            client.connect()
            return client.load(
                model,
                self._options.load,
                lambda share: line.show(f"{name}: {loading_text(share)}"),
                self._options.keep_alive,
            )

    def run(
        self,
        model: str | None,
        lines: list[BatchLine],
        results: ResultFile,
        total: int,
        *,
        replaces: bool,
    ) -> None:
        """total: lines of the whole batch. replaces: the model replaces that of the lines."""
        from localgen.batch.run import BatchRun

        options, extra = self._options, dict[str, Any]()
        if self._endpoint is None:
            extra = {"priority": options.priority, "save_prefix": False}
        info = self.load(model)
        progress = _RunProgress(results, total)
        run = BatchRun(
            self._batch,
            results,
            self._create_client,
            model=model if replaces else None,
            extra=extra,
            on_progress=progress.update,
        )
        most = _GPU_CONCURRENCY if "GPU" in info.processor else _CPU_CONCURRENCY
        at_once = self._concurrency or min(most, info.max_seqs or most)
        with progress:
            run.run(lines, min(at_once, len(lines)))

    def _create_client(self) -> Client:
        return create_client(self._endpoint, _ignore)


class _ProgressLine:
    """A line on stderr that is written over; without a terminal, a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._said_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{one_line(text)}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said_s >= _LINE_INTERVAL_S:
            self._said_s = time.monotonic()
            _say(text)


class _RunProgress(_ProgressLine):
    """`120/500 · 2 failed · 345 tok/s · 3 min 10 s left`, from the start of the requests on."""

    def __init__(self, results: ResultFile, total: int) -> None:
        super().__init__()
        self._results, self._total = results, total
        self._started_s = time.monotonic()
        self._said_s = -_LINE_INTERVAL_S  # the first line is shown at once
        self.show(self._text(0, 0, 0.0))

    def update(self, progress: Progress) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self.show(self._text(progress.num_done, progress.generated_tokens, elapsed_s))

    def _text(self, num_done: int, generated_tokens: int, elapsed_s: float) -> str:
        done, failed = len(self._results.done), self._results.num_failed
        left = ""
        if num_done:
            left_s = elapsed_s / num_done * (self._total - done)
            left = f"{format_elapsed(left_s)} left"
        rate = generated_tokens / max(elapsed_s, 1e-9)
        parts = (
            f"{done:,}/{self._total:,}",
            f"{failed:,} failed" if failed else "",
            f"{rate:,.0f} tok/s" if generated_tokens else "",
            left,
        )
        return " · ".join(part for part in parts if part)


def _report(out: Path, results: ResultFile, total: int) -> None:
    done, failed = len(results.done), results.num_failed
    note = f", {failed:,} with an error of the server: see status_code" if failed else ""
    _say(f"{format_count(done, 'result')} in {out}{note}")
    if done < total:
        _say(f"{total - done:,} of {total:,} were refused for now: the same command asks again")
    if failed or done < total:
        raise typer.Exit(1)


def _ignore(line: str) -> None:
    pass


def _say(text: str) -> None:
    print(one_line(text), file=sys.stderr)
