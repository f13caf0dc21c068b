"""`localgen run --batch`: validate, resume, progress, and what is left at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count, format_elapsed
from localgen.batch.lines import BatchLine, LineProblem, read_batch
from localgen.chat.parameters import ModelOptions
from localgen.cli.options import REQUEST_OPTIONS, SAMPLING_OPTIONS
from localgen.cli.remote_options import create_client, is_from_command_line

if TYPE_CHECKING:
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
    lines = _validated_lines(batch, is_local=endpoint is None)
    if endpoint is None:
        _require_models(batch, lines, model)
    from localgen.batch.results import ResultFile

    with ResultFile.opened(out, {line.custom_id for line in lines}) as results:
        left = [line for line in lines if line.custom_id not in results.done]
        if results.done:
            _say(f"{out} has {len(results.done):,} of {len(lines):,} results: {len(left):,} left")
        if not has_priority:
            options = replace(options, priority=_PRIORITY)
        job = _Job(batch, results, len(lines), options, endpoint, concurrency)
        try:
            for name, group in _by_model(left, model).items():
                job.run(name, group, replaces=model is not None)
        except KeyboardInterrupt:
            done = len(results.done)
            _say(f"stopped: {done:,} of {len(lines):,} are done, the same command resumes")
            raise
        _report(out, results, len(lines))


def _validated_lines(path: Path, *, is_local: bool) -> list[BatchLine]:
    def accept(url: str, body: dict[str, Any]) -> None:
        """Another server has a schema of its own."""

    validate = accept
    if is_local:
        from localgen.batch.schema import validate_body as validate
    lines, problems = read_batch(path, validate)
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


def _require_models(path: Path, lines: list[BatchLine], model: str | None) -> None:
    """Raise the error of a model that is not installed, before any other is loaded."""
    from localgen.hub.resolve import resolve_model

    for name, group in _by_model(lines, model).items():
        try:
            resolve_model(name)
        except LocalgenError as error:
            place = "" if model is not None else f"{path}: line {group[0].number}: "
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
    """Runs the lines of one model after those of another. total: lines of the whole batch."""

    def __init__(
        self,
        batch: Path,
        results: ResultFile,
        total: int,
        options: ModelOptions,
        endpoint: Endpoint | None,
        concurrency: int | None,
    ) -> None:
        self._batch, self._results, self._options = batch, results, options
        self._endpoint, self._concurrency = endpoint, concurrency
        self._progress = _ProgressLine(results, total)

    def run(self, model: str | None, lines: list[BatchLine], *, replaces: bool) -> None:
        from localgen.batch.run import BatchRun
        from localgen.hub.packaged import default_model

        options, extra = self._options, dict[str, Any]()
        if self._endpoint is None:
            extra = {"priority": options.priority, "save_prefix": False}
        with closing(self._create_client()) as client:
            client.connect()
            self._progress.show(f"loading {model or default_model()}")
            info = client.load(model, options.load, keep_alive=options.keep_alive)
        run = BatchRun(
            self._batch,
            self._results,
            self._create_client,
            model=model if replaces else None,
            extra=extra,
            on_progress=self._progress.update,
        )
        most = _GPU_CONCURRENCY if "GPU" in info.processor else _CPU_CONCURRENCY
        at_once = self._concurrency or min(most, info.max_seqs or most)
        with self._progress:
            run.run(lines, min(at_once, len(lines)))

    def _create_client(self) -> Client:
        return create_client(self._endpoint, _ignore)


class _ProgressLine:
    """`120/500 · 2 failed · 345 tok/s · 3 min 10 s left`; not on a terminal, only now and then."""

    def __init__(self, results: ResultFile, total: int) -> None:
        self._results, self._total = results, total
        self._is_terminal = sys.stderr.isatty()
        self._started_s = self._said_s = time.monotonic()

    def __enter__(self) -> _ProgressLine:
        self._started_s = self._said_s = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def update(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if not self._is_terminal and now_s - self._said_s < _LINE_INTERVAL_S:
            return
        self._said_s = now_s
        self.show(self._text(progress, now_s - self._started_s))

    def show(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{one_line(text)}", end="", file=sys.stderr, flush=True)
        elif not text.startswith("loading"):
            _say(text)

    def _text(self, progress: Progress, elapsed_s: float) -> str:
        done, failed = len(self._results.done), self._results.num_failed
        left = ""
        if progress.num_done:
            left_s = elapsed_s / progress.num_done * (self._total - done)
            left = f"{format_elapsed(left_s)} left"
        rate = progress.generated_tokens / max(elapsed_s, 1e-9)
        parts = (
            f"{done:,}/{self._total:,}",
            f"{failed:,} failed" if failed else "",
            f"{rate:,.0f} tok/s" if progress.generated_tokens else "",
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
