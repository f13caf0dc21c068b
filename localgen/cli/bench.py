"""`localgen bench`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import localgen
from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli import tables
from localgen.cli.arguments import JsonFlag, ModelArgument
from localgen.cli.options import takes_bench_options
from localgen.cli.pull import run_or_offer_pull
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_client,
    endpoint_from_options,
    is_from_command_line,
)

if TYPE_CHECKING:
    from localgen.backends.model_info import LoadOptions
    from localgen.bench.load_report import LoadResult
    from localgen.bench.report import BenchResult
    from localgen.bench.run import BenchPlan
    from localgen.bench.saved_results import Requirement
    from localgen.client.endpoints import Endpoint

    Result = BenchResult | LoadResult

_MIN_SECONDS, _SECONDS, _SEARCH_SECONDS = 5.0, 60.0, 300.0
TimeOption = Annotated[
    float | None,
    typer.Option(
        "--time",
        metavar="SECONDS",
        help="Time for everything (default: 60; with --slo 300); what does not fit is left out.",
        min=_MIN_SECONDS,
    ),
]
LevelOption = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="GOALS",
        help="Search for the highest rate at which 95 % of the requests keep these goals, such as "
        "ttft=1s,tpot=125ms (the default of the other reports). With another load: its goals.",
    ),
]
MatrixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--matrix",
        metavar="OPTIONS",
        help="Measure each combination of load options, such as 'threads=1,2 ctk=f16,q8_0', each "
        "for --time seconds.",
    ),
]
ResumeFlag = Annotated[
    bool,
    typer.Option("--resume", help="Leave out the combinations that the file of --save has."),
]
_PANEL = "Load (instead of the tests of one stream)"
RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate", metavar="PER_S", help="Send requests at a rate.", rich_help_panel=_PANEL
    ),
]
PoissonFlag = Annotated[
    bool,
    typer.Option(
        "--poisson", help="Send them at random times, as people do.", rich_help_panel=_PANEL
    ),
]
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,N",
        help="Keep so many requests running, one load after the other.",
        rich_help_panel=_PANEL,
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Send the requests of a trace in Mooncake's format, at its times.",
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Use the prompts of a file of JSON lines, or of ShareGPT, instead of random words.",
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
InputOption = Annotated[
    int | None,
    typer.Option(
        "--input-len",
        metavar="TOKENS",
        help="Length of the random prompts (default: 128).",
        min=1,
        max=1_000_000,
        rich_help_panel=_PANEL,
    ),
]
OutputOption = Annotated[
    int | None,
    typer.Option(
        "--output-len",
        metavar="TOKENS",
        help="Length of the answers (default: 64).",
        min=1,
        max=1_000_000,
        rich_help_panel=_PANEL,
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--shared-prefix",
        metavar="TOKENSxN",
        help="Begin the random prompts with one of N prefixes, such as 4096x8.",
        rich_help_panel=_PANEL,
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the latencies over the load in an SVG file too.",
        dir_okay=False,
        rich_help_panel=_PANEL,
    ),
]
SaveOption = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE", help="Write the result as JSON.", dir_okay=False),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare",
        metavar="FILE FILE",
        help="Compare two saved results, and measure nothing.",
    ),
]
RequireOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="BOUND",
        help="Exit with status 1 unless a figure keeps its bound, such as tg128>=30 "
        "(may be repeated).",
    ),
]


@takes_bench_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    seconds: TimeOption = None,
    level: LevelOption = None,
    json: JsonFlag = False,
    save: SaveOption = None,
    compare: CompareOption = None,
    require: RequireOption = None,
    matrix: MatrixOption = None,
    resume: ResumeFlag = False,
    rate: RateOption = None,
    poisson: PoissonFlag = False,
    concurrency: ConcurrencyOption = None,
    trace: TraceOption = None,
    prompts: PromptsOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    shared_prefix: PrefixOption = None,
    plot: PlotOption = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Measure a model's speed, and how many people it serves before it feels slow.

    Speeds are in llama-bench's table, without drafts; the drafts have a row of their own. A model
    of this machine runs in an engine of its own meanwhile.
    """
    from localgen.bench.saved_results import parse_requirement
    from localgen.bench.service_level import ServiceLevel, parse_service_level

    if compare is not None:
        _reject_others(context)
        _print_comparison(*compare)
        return
    requirements = [parse_requirement(text) for text in require or ()]
    endpoint = endpoint_from_options(context, url, api_key_env)
    from localgen.bench.load_plan import load_plan
    from localgen.bench.run import BenchPlan

    load = load_plan(
        rate=rate,
        is_poisson=poisson,
        concurrency=concurrency,
        trace=trace,
        prompts=prompts,
        input_tokens=input_len,
        output_tokens=output_len,
        shared_prefix=shared_prefix,
        is_search=level is not None,
    )
    if plot is not None and (load is None or not (load.is_search or len(load.concurrency) > 1)):
        raise InvalidRequest(
            "--plot draws several loads: give --slo, or --concurrency 1,2,4, as well"
        )
    default_s = _SECONDS if load is None or not load.is_search else _SEARCH_SECONDS
    service_level = ServiceLevel() if level is None else parse_service_level(level)
    plan = BenchPlan(seconds or default_s, service_level, load)
    for option, path in (("--save", save), ("--plot", plot)):
        _require_writable(option, path)
    _end_like_an_interrupt()
    if resume and (matrix is None or save is None):
        raise InvalidRequest("--resume continues a --matrix: give that and its --save FILE as well")
    if matrix is not None:
        if endpoint is not None or load is not None or requirements:
            raise InvalidRequest(
                "--matrix is about load options: leave --url, --require and the options of a load "
                "out"
            )
        _bench_matrix(model, options, plan, matrix, save, resume=resume, json_output=json)
        return
    found: list[Result] = []
    if endpoint is not None:
        found.append(_bench_remote(endpoint, model or endpoint.model, plan))
    else:
        run_or_offer_pull(
            model,
            lambda: found.append(_bench_local(model, options, plan)),
            draft=options.load.draft,
        )
    _show(found[0], requirements, save, plot, json_output=json)


def _bench_local(model: str | None, options: ModelOptions, plan: BenchPlan) -> Result:
    from localgen.bench.run import bench_local
    from localgen.cli.one_shot import stderr_console
    from localgen.hub.packaged import default_model
    from localgen.hub.resolve import expand_alias

    # the server of the benchmark has no aliases
    model = expand_alias(model or default_model())
    with stderr_console().status(f"loading {model}") as line:
        return bench_local(
            model,
            options.load,
            plan,
            line.update,
            lambda share: line.update(f"loading {model} {share:.0%}"),
        )


def _bench_matrix(
    model: str | None,
    options: ModelOptions,
    plan: BenchPlan,
    matrix: list[str],
    save: Path | None,
    *,
    resume: bool,
    json_output: bool,
) -> None:
    from localgen.bench.matrix import matrix_table, run_matrix
    from localgen.bench.report import BenchResult
    from localgen.cli.bench_matrix import parse_matrix
    from localgen.hub.packaged import default_model

    combinations = parse_matrix(matrix, options)

    def measure(load: LoadOptions) -> BenchResult:
        result = _bench_local(model, replace(options, load=load), plan)
        assert isinstance(result, BenchResult)  # no load was asked for
        return result

    name = model or default_model()
    done = run_matrix(name, combinations, measure, save, resume=resume, notify=tables.print_notice)
    if json_output:
        typer.echo(tables.json_text(done, indent=2))
    else:
        for line in matrix_table(done).split("\n"):
            tables.print_line(line)


def _bench_remote(endpoint: Endpoint, model: str | None, plan: BenchPlan) -> Result:
    from localgen.bench.run import bench_remote
    from localgen.cli.one_shot import stderr_console

    with (
        closing(create_client(endpoint, tables.print_notice)) as client,
        stderr_console().status("connecting") as line,
    ):
        return bench_remote(client, model, plan, line.update)


def _show(
    result: Result,
    requirements: list[Requirement],
    save: Path | None,
    plot: Path | None,
    *,
    json_output: bool,
) -> None:
    from localgen.bench import saved_results

    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"date": now, "localgen": localgen.__version__} | result.record()
    if json_output:
        typer.echo(tables.json_text(record, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in result.text(width).split("\n"):
            tables.print_line(line)
    if save is not None:
        saved_results.save(record, save)
    if plot is not None:
        _draw(result, plot)
    checks = [requirement.check(record) for requirement in requirements]
    for _, line in checks:
        tables.print_notice(line)
    if result.is_interrupted:
        raise KeyboardInterrupt
    if not all(is_kept for is_kept, _ in checks):
        raise typer.Exit(1)


def _print_comparison(before: Path, after: Path) -> None:
    from localgen.bench import saved_results

    records = [saved_results.read(path) for path in (before, after)]
    for line in saved_results.compare(*records):
        tables.print_line(line)


def _draw(result: Result, path: Path) -> None:
    """Write the chart of loads as SVG. Raises InvalidRequest if there is none, or no room."""
    from localgen.charts import chart_svg

    if result.chart is None:
        raise InvalidRequest(f"--plot {path}: fewer than two loads were answered", param="plot")
    try:
        path.write_text(chart_svg(result.chart), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"--plot {path}: {error.strerror}", param="plot") from error


def _require_writable(option: str, path: Path | None) -> None:
    """Raises InvalidRequest before a minute is spent, if the result could not be written."""
    if path is None:
        return
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.absolute().parent.is_dir():
        reason = "its folder does not exist"
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        reason = "it cannot be written"
    if reason:
        raise InvalidRequest(f"{option} {path}: {reason}")


def _reject_others(context: typer.Context) -> None:
    """Raises InvalidRequest if an option is given that a comparison would ignore."""
    others = (name for name in context.params if name != "compare")
    given = [name for name in others if is_from_command_line(context, name)]
    if given:
        raise InvalidRequest("--compare measures nothing: leave the other arguments out")


def _end_like_an_interrupt() -> None:
    """Have a signal that ends the program stop the server of the benchmark first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
