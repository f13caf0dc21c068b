"""`localgen cluster`: several engines behind one address."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.chat.parameters import ModelOptions
from localgen.cli import server_options
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_model
from localgen.cli.options import Stabilize, takes_cluster_options
from localgen.config import BadSetting

if TYPE_CHECKING:
    from localgen.cluster.config import ClusterConfig
    from localgen.cluster.running import RunningCluster

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def cluster() -> None:
    """Run several engines behind one address, on Ray Serve; needs localgen[cluster]."""


@group.command("up")
@takes_cluster_options
def up(
    options: ModelOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model that each replica loads at its start.", autocompletion=complete_model
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="Settings: cluster.toml. Options replace them."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Number of engines (default: 2).", metavar="<int>")
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            help="Start more engines, up to this many, when requests wait.", metavar="<int>"
        ),
    ] = None,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            help="With --max-replicas: end idle engines, down to this many (default: 1); 0 is "
            "possible.",
            metavar="<int>",
        ),
    ] = None,
    ttft_slo_ms: Annotated[
        int | None,
        typer.Option(
            help="With --max-replicas: start one more while the p95 of the time to the first "
            "token is longer.",
            metavar="<int>",
        ),
    ] = None,
    gpus_per_replica: Annotated[
        int | None,
        typer.Option(
            help="GPUs that each engine has for itself (default: 0, all engines see all of them).",
            metavar="<int>",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the gateway (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway (default: 8080).", metavar="<int>")
    ] = None,
    api_key_file: server_options.ApiKeyFile = None,
    replicas_per_machine: Annotated[
        int | None,
        typer.Option(
            help="With --address: the most engines on one machine (default: they are divided "
            "among the machines that are there).",
            metavar="<int>",
        ),
    ] = None,
    allow_host: server_options.AllowHost = None,
    cors_origin: server_options.CorsOrigin = None,
    rate_limit: server_options.RateLimit = None,
    max_body: server_options.MaxBody = None,
    timeout: server_options.Timeout = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            help="Unload a model when idle for this time: 30s, 5m, 1h; -1: never (default: 5m, and "
            "never the cluster's own model)."
        ),
    ] = None,
    hang_timeout: server_options.HangTimeout = None,
    stabilize: Stabilize = False,
    record_trace: server_options.RecordTrace = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster that runs, as for `ray start` (default: one of its own)."),
    ] = None,
) -> None:
    """Start a cluster, and wait until it answers. It runs until `localgen cluster down`.

    A model that is not installed is downloaded first, on each machine once.
    """
    from localgen.cli import tables
    from localgen.cluster import running
    from localgen.cluster.config import ClusterConfig, read_cluster_file
    from localgen.config import ServerSettings

    config = (ClusterConfig() if file is None else read_cluster_file(file)).with_options(
        model=model,
        replicas=replicas,
        max_replicas=max_replicas,
        min_replicas=min_replicas,
        ttft_slo_ms=ttft_slo_ms,
        replicas_per_machine=replicas_per_machine,
        gpus_per_replica=gpus_per_replica,
        host=host,
        port=port,
        api_key_file=None if api_key_file is None else str(api_key_file.absolute()),
        allow_host=",".join(allow_host) if allow_host else None,
        cors_origin=",".join(cors_origin) if cors_origin else None,
        rate_limit=rate_limit,
        max_body=max_body,
        timeout_s=timeout,
        keep_alive=keep_alive,
        hang_timeout_s=hang_timeout,
        stabilize=stabilize or None,
        record_trace=None if record_trace is None else str(record_trace.absolute()),
        address=address,
        load=options.load,
    )
    settings = ServerSettings.from_environment()
    running.require_startable(config, settings)
    config = config.with_default_model()
    name = _model_name(config)
    replicas_text = "1 replica" if config.replicas == 1 else f"{config.replicas} replicas"
    tables.print_notice(f"starting {replicas_text}; log: {running.log_path(settings)}")
    started = running.start(config, name, settings)
    tables.print_line(f"{started.url} answers: localgen chat --url {_name_of(started)}")


@group.command()
def status(json: JsonFlag = False) -> None:
    """List the replicas: their models and requests."""
    from localgen.cli import tables
    from localgen.cluster.status import ReplicaStatus, fetch_status

    rows = fetch_status(_find())
    if json:
        tables.print_json(rows)
    else:
        tables.print_table(ReplicaStatus.HEADER, [row.cells() for row in rows])


@group.command()
def down() -> None:
    """End the cluster. Running requests have up to 30 s, and new ones are refused.

    Ctrl+C ends the running ones at once, with an error.
    """
    from localgen.cli import tables
    from localgen.cluster import running
    from localgen.config import ServerSettings

    found = _find()
    seconds = f"{running.DRAIN_TIMEOUT_S:.0f} s"
    tables.print_notice(f"running requests have up to {seconds}; Ctrl+C ends them now")
    running.stop(found, ServerSettings.from_environment())
    tables.print_line("cluster stopped")


def _model_name(config: ClusterConfig) -> str:
    """The name of the model, which is downloaded if only this machine needs it."""
    from localgen.cli.pull import pull_with_progress
    from localgen.client.pullable_models import can_pull
    from localgen.cluster.model_download import model_name

    is_ours = config.command is None and config.address is None
    if is_ours and config.model is not None and can_pull(config.model):
        pull_with_progress(config.model)
    return model_name(config)


def _name_of(cluster: RunningCluster) -> str:
    """The value for `--url`: `cluster`, or its URL if an endpoint has that name."""
    from localgen.client.endpoints import CLUSTER, load_endpoints

    with contextlib.suppress(BadSetting):  # URLs work with a damaged file
        if CLUSTER not in load_endpoints():
            return CLUSTER
    return cluster.url


def _find() -> RunningCluster:
    """The cluster of this user. Raises ServerUnavailable if none runs."""
    from localgen.cluster.running import RunningCluster
    from localgen.config import ServerSettings

    return RunningCluster.get(ServerSettings.from_environment())
