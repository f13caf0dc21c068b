"""`python -m benchmarks.simulation`: a cluster of many replicas in simulated time.

Prints a row for each number of replicas and each policy: what was cached, times to the first
token, and what it cost. Each policy plays the same trace. docs/cluster-scale.md says what is
assumed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.measure import ModelLine, Report, command, table
from benchmarks.simulation.autoscaler import Autoscaler, Bounds
from benchmarks.simulation.cluster import Cluster, Fleet
from benchmarks.simulation.costs import EngineCosts, load_costs
from benchmarks.simulation.gateway import POLICIES, Routing
from benchmarks.simulation.machine import fair_shares
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.request import Request
from benchmarks.simulation.workload import Workload, conversations, recorded
from localgen.backends.errors import InvalidRequest
from localgen.cluster.autoscaling import ScalingPolicy
from localgen.cluster.config import ClusterConfig
from localgen.cluster.prefix_table import table_chunks

_HEAD = (
    "replicas",
    "policy",
    "cached",
    "TTFT p50",
    "p95",
    "p99",
    "in time",
    "failed",
    "prompt tokens computed",
    "replica hours",
    "per decision",
    "events/s",
)
# of localgen.cluster.deployment, which needs Ray
_UPSCALE_DELAY_S = 3.0
Trace = Callable[[int], Iterable[Request]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Ends the program if they contradict each other."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.simulation")
    _add_load_options(parser)
    _add_cluster_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    for name in options.policy.split(","):
        if name not in POLICIES:
            parser.error(f"--policy {name}: there are {', '.join(POLICIES)}")
    if not all(count.isdecimal() and int(count) for count in options.replicas.split(",")):
        parser.error(f"--replicas {options.replicas}: give numbers such as 10,100,1000")
    if options.max_replicas is None and options.slo_scaling:
        parser.error("--slo-scaling is for a number that changes: give --max-replicas")
    if not 0 <= options.report < math.inf:
        parser.error(f"--report {options.report}: give seconds, or 0")
    if not 0 <= options.swing < 1:
        parser.error(f"--swing {options.swing}: give 0 to below 1")
    return options


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=1000, help="per replica (default: 1000)")
    add("--rate", type=float, default=6.0, help="requests/s per replica (default: 6)")
    add("--trace", type=Path, help="a recorded trace, in place of conversations")
    add("--prompts", type=int, default=1000, help="system prompts (default: 1000)")
    add("--system", type=int, default=2000, help="tokens of each (default: 2000)")
    add("--zipf", type=float, default=1.0, help="exponent of their popularity (default: 1)")
    add("--turns", type=float, default=5.0, help="mean of a conversation (default: 5)")
    add("--question", type=int, default=100, help="mean tokens (default: 100)")
    add("--answer", type=int, default=200, help="mean tokens (default: 200)")
    add("--think", type=float, default=30.0, help="mean s between turns (default: 30)")
    add("--swing", type=float, default=0.0, help="of the rate in a day, 0 to 1 (default: 0)")
    add("--day", type=float, default=86_400.0, help="seconds of a day (default: 86,400)")


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, ClusterConfig()
    add("--costs", default="h100-8b-bf16", help="a name in costs/, or a file")
    add("--replicas", default="10", help="numbers, with commas (default: 10)")
    add("--policy", default=",".join(POLICIES), help="with commas (default: all)")
    add("--spill", type=int, default=default.spill)
    add("--table", type=int, help="chunks that a gateway remembers (default: as a real one)")
    add("--report", type=float, default=0.0, help="s between reports of replicas (0: none)")
    add("--gateways", type=int, default=1)
    add("--shared-load", action="store_true", help="gateways know each other's requests")
    add("--fetch-latency", type=float, default=0.005, help="s (default: 0.005)")
    add("--fetch-gbit", type=float, default=100.0, help="Gbit/s between replicas (default: 100)")
    add("--replicas-per-machine", type=int, default=1)
    add("--cores", type=int, help="of a machine, if replicas share them")
    add("--mean-life", type=float, help="s until a replica dies (default: never)")
    add("--start", type=float, default=60.0, help="s until a new replica is ready (default: 60)")
    add("--max-replicas", type=int, help="their number changes with the load")
    add("--min-replicas", type=int, default=default.min_replicas)
    add("--target-requests", type=int, default=default.target_requests)
    add("--downscale-delay", type=float, default=float(default.downscale_delay_s))
    add("--slo-scaling", action="store_true", help="scale by --ttft-slo as well")
    add("--ttft-slo", type=float, default=0.5, help="s, for `in time` (default: 0.5)")


def trace_of(options: argparse.Namespace) -> Trace:
    """The requests for a number of replicas."""
    if options.trace:
        requests = recorded(options.trace)
        return lambda replicas: requests

    def make(replicas: int) -> Iterator[Request]:
        load = Workload(
            rate=options.rate * replicas,
            num_requests=options.requests * replicas,
            num_prompts=options.prompts,
            system=options.system,
            zipf=options.zipf,
            turns=options.turns,
            question=options.question,
            answer=options.answer,
            think_s=options.think,
            swing=options.swing,
            day_s=options.day,
            seed=options.seed,
        )
        return conversations(load)

    return make


def routing_of(options: argparse.Namespace, replicas: int, policy: str) -> Routing:
    return Routing(
        policy=policy,
        spill=options.spill,
        max_chunks=(
            table_chunks(max(replicas, options.max_replicas or 0))
            if options.table is None
            else options.table
        ),
        gateways=options.gateways,
        sees_all=options.shared_load,
        report_s=options.report,
        fetch_latency_s=options.fetch_latency,
        fetch_bytes_s=options.fetch_gbit * 1e9 / 8,
    )


def simulate(
    options: argparse.Namespace, costs: EngineCosts, replicas: int, policy: str, trace: Trace
) -> Outcome:
    """One row of the table."""
    slowdowns: tuple[float, ...] = ()
    if options.cores is not None:
        slowdowns = fair_shares(options.replicas_per_machine, costs.threads, options.cores)
    fleet = Fleet(
        replicas=replicas,
        replicas_per_machine=options.replicas_per_machine,
        slowdowns=slowdowns,
        start_s=options.start,
        mean_life_s=options.mean_life,
        seed=options.seed,
    )
    cluster = Cluster(fleet, costs, routing_of(options, replicas, policy))
    if options.max_replicas is not None:
        slo_ms = round(options.ttft_slo * 1e3) if options.slo_scaling else None
        bounds = Bounds(
            least=options.min_replicas,
            most=options.max_replicas,
            up_s=_UPSCALE_DELAY_S,
            down_s=options.downscale_delay,
        )
        Autoscaler(cluster, ScalingPolicy(options.target_requests, slo_ms), bounds)
    return cluster.play(trace(replicas))


def row(replicas: int, policy: str, outcome: Outcome, ttft_slo_s: float) -> tuple[str, ...]:
    times = (f"{outcome.ttft_percentile_s(percent):.3f} s" for percent in (50, 95, 99))
    decision_us = outcome.routing_wall_s / max(1, outcome.num_requests) * 1e6
    return (
        f"{replicas:,}",
        policy,
        f"{outcome.hit_rate:.1%}",
        *times,
        f"{outcome.attainment(ttft_slo_s):.1%}",
        f"{outcome.failed + outcome.refused:,}",
        f"{outcome.computed_tokens:,}",
        f"{outcome.replica_s / 3600:.2f}",
        f"{decision_us:.0f} µs",
        f"{outcome.num_events / outcome.wall_s:,.0f}",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the simulations; prints their table."""
    options = parse(arguments)
    try:
        costs, trace = load_costs(options.costs), trace_of(options)
    except (ValueError, InvalidRequest) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = Report(ModelLine(options.costs, 0, 0), 1, False, 1, {})
    rows = []
    for replicas in map(int, options.replicas.split(",")):
        for policy in options.policy.split(","):
            outcome = simulate(options, costs, replicas, policy, trace)
            rows.append(row(replicas, policy, outcome, options.ttft_slo))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            for name, value in outcome.figures(options.ttft_slo).items():
                report.add(f"{replicas} replicas: {name}", policy, "", [value])
    print(table(_HEAD, rows))
    report.commands.append(command("benchmarks.simulation", arguments))
    report.save("simulation", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
