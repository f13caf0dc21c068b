"""A checkup as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from localgen.backends.terminal_text import one_line
from localgen.backends.units import size
from localgen.cli.tables import json_text
from localgen.doctor.checkup import Checkup
from localgen.doctor.findings import Finding
from localgen.machine.llama_build import BrokenBuild, LlamaBuild
from localgen.machine.system_info import Machine

_WIDTH = 10


def as_text(found: Checkup) -> str:
    """A line for each fact, then the findings with their remedies."""
    rows = [*_machine_rows(found.machine), *_llama_rows(found.llama, found.machine)]
    rows += [("cuda", _cuda(found)), *_own_rows(found)]
    lines = [f"{name:<{_WIDTH}} {one_line(text)}" for name, text in rows]
    told = [line for finding in found.findings for line in _finding_lines(finding)]
    return "\n".join([*lines, "", *(told or ["nothing to complain of"])])


def as_json(found: Checkup) -> str:
    """The checkup as one JSON object."""
    return json_text(asdict(found), indent=2)


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "system", machine.system
    quota = f", container limit {machine.cpu_quota:.1f}" if machine.cpu_quota else ""
    cores = f"{machine.physical_cores} cores, {machine.logical_cores} threads{quota}"
    yield "cpu", f"{machine.cpu}, {cores}"
    total, available = size(machine.ram_bytes), size(machine.ram_available_bytes)
    yield "memory", f"{total}, {available} available"
    yield "gpu", "; ".join(machine.nvidia) or _other_gpu(machine)


def _other_gpu(machine: Machine) -> str:
    if machine.metal:
        return "Apple, through Metal"
    return ", ".join(machine.displays) or "none found (no nvidia-smi, no display adapter)"


def _llama_rows(build: LlamaBuild | BrokenBuild, machine: Machine) -> Iterator[tuple[str, str]]:
    if isinstance(build, BrokenBuild):
        yield "llama.cpp", f"unusable: {build.reason}"
        return
    yield "llama.cpp", f"llama-cpp-python {build.version} in {build.folder}"
    yield "built with", " ".join(build.features)
    yield "devices", "; ".join(build.devices) or "none"
    yield "runs on", _where(build, machine)
    yield "threads", f"{build.threads}, {_why_threads(build, machine)}"


def _cuda(found: Checkup) -> str:
    if found.no_cuda is None:
        return "usable: models go to the GPU where they fit"
    return f"not used: {found.no_cuda}"


def _where(build: LlamaBuild, machine: Machine) -> str:
    if build.gpu:
        return "GPU: this build can offload, all layers go there unless -ngl says otherwise"
    if machine.nvidia or machine.metal or machine.displays:
        return "CPU: this build of llama.cpp cannot use a GPU"
    return "CPU: there is no GPU, and this build of llama.cpp could not use one"


def _why_threads(build: LlamaBuild, machine: Machine) -> str:
    if build.threads < machine.physical_cores:
        return f"as many of the {machine.physical_cores} cores as this process may use"
    return "one for each physical core: decoding is bound by memory, more do not help"


def _own_rows(found: Checkup) -> Iterator[tuple[str, str]]:
    yield "localgen", f"{found.version} on {found.python}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())
    yield "server", found.server
    yield "socket", found.socket
    yield "log", found.log
    yield "state", found.state
    yield "models", ", ".join(found.models) or "none"


def _finding_lines(finding: Finding) -> list[str]:
    kind = "ERROR" if finding.error else "warning"
    return [f"{kind}: {one_line(finding.message)}", f"    {one_line(finding.remedy)}"]
