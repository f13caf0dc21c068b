"""The result of `localgen doctor` as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_size
from localgen.cli.tables import json_text
from localgen.doctor.checkup import Checkup
from localgen.doctor.findings import Finding
from localgen.machine.busy_processes import BusyProgram
from localgen.machine.llama_build import BrokenBuild, LlamaBuild
from localgen.machine.system_info import SystemInfo

_WIDTH = 10
_MAX_BUSY = 3


def checkup_text(result: Checkup) -> str:
    """One line per fact, then the findings with their remedies."""
    rows = [*_machine_rows(result.machine), ("cpu use", _cpu_use(result.busy))]
    rows += [*_llama_rows(result.llama, result.machine)]
    rows += [("cuda", _cuda_status(result)), *_localgen_rows(result)]
    lines = [f"{name:<{_WIDTH}} {one_line(text)}" for name, text in rows]
    findings = [line for finding in result.findings for line in _finding_lines(finding)]
    return "\n".join([*lines, "", *(findings or ["no problems found"])])


def checkup_json(result: Checkup) -> str:
    return json_text(asdict(result), indent=2)


def _machine_rows(machine: SystemInfo) -> Iterator[tuple[str, str]]:
    yield "system", machine.system
    quota = f", container limit {machine.cpu_quota:.1f}" if machine.cpu_quota else ""
    cores = f"{machine.physical_cores} cores, {machine.logical_cores} threads{quota}"
    yield "cpu", f"{machine.cpu}, {cores}"
    total, available = format_size(machine.ram_bytes), format_size(machine.ram_available_bytes)
    yield "memory", f"{total}, {available} available"
    yield "gpu", "; ".join(machine.nvidia) or _other_gpu(machine)


def _cpu_use(programs: Sequence[BusyProgram]) -> str:
    busiest = (f"{program.name} {program.cores:.1f} cores" for program in programs[:_MAX_BUSY])
    return ", ".join(busiest) or "no other program uses the processor now"


def _other_gpu(machine: SystemInfo) -> str:
    if machine.metal:
        return "Apple (Metal)"
    return ", ".join(machine.displays) or "none found (no nvidia-smi, no display adapter)"


def _llama_rows(build: LlamaBuild | BrokenBuild, machine: SystemInfo) -> Iterator[tuple[str, str]]:
    if isinstance(build, BrokenBuild):
        yield "llama.cpp", f"unusable: {build.reason}"
        return
    yield "llama.cpp", f"llama-cpp-python {build.version} in {build.folder}"
    yield "built with", " ".join(build.features)
    yield "devices", "; ".join(build.devices) or "none"
    yield "runs on", _placement(build, machine)
    yield "threads", f"{build.threads}, {_threads_reason(build, machine)}"


def _cuda_status(result: Checkup) -> str:
    if result.no_cuda is None:
        return "usable: models run on the GPU if they fit"
    return f"not used: {result.no_cuda}"


def _placement(build: LlamaBuild, machine: SystemInfo) -> str:
    if build.gpu:
        return "GPU: this build offloads all layers unless -ngl sets fewer"
    if machine.nvidia or machine.metal or machine.displays:
        return "CPU: this build of llama.cpp has no GPU support"
    return "CPU: no GPU found, and this build of llama.cpp has no GPU support"


def _threads_reason(build: LlamaBuild, machine: SystemInfo) -> str:
    if build.threads < machine.physical_cores:
        return f"those of the {machine.physical_cores} cores that this process may use"
    return "one per physical core: decode is memory-bound, more threads do not help"


def _localgen_rows(result: Checkup) -> Iterator[tuple[str, str]]:
    yield "localgen", f"{result.version} on {result.python}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in result.packages.items())
    yield "server", result.server
    yield "socket", result.socket
    yield "log", result.log
    yield "state", result.state
    yield "models", ", ".join(result.models) or "none"


def _finding_lines(finding: Finding) -> list[str]:
    kind = "ERROR" if finding.error else "warning"
    return [f"{kind}: {one_line(finding.message)}", f"    {one_line(finding.remedy)}"]
