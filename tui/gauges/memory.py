"""Where memory goes: of each model weights and cache, beside processes and machine."""

from __future__ import annotations

from textual.content import Content

from localgen.backends.readings import GpuUse, MachineUse
from localgen.tui import figures
from localgen.tui.gauges.drawing import FILLS, bar, spread, stacked
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.readings import Memory, ModelMemory

_LEAST_BAR = 8


class MemoryGauge(Gauge[Memory]):
    """Models, then main memory and CPU, then GPUs."""

    def __init__(self) -> None:
        super().__init__("Memory", id="memory")

    def lines(self, reading: Memory, width: int, height: int) -> list[Content]:
        """The machine comes last and is kept; models give way where there is no room for all."""
        machine = _machine(reading, width)
        room = height - len(machine)
        models = reading.models or ()
        if not models:
            says = "no model is loaded" if reading.models is not None else ""
            return [Content.styled(says, "$text-muted"), *machine]
        each = max(1, min(3, room // len(models)))
        lines = [line for model in models for line in _model(model, width)[:each]]
        if len(lines) > room:
            hidden = len(models) - max(0, room - 1)
            lines = [*lines[: max(0, room - 1)], Content.styled(f"… {hidden} more", "$text-muted")]
        return [*lines, *machine]


def _model(model: ModelMemory, width: int) -> list[Content]:
    if model.state == "loading":
        share = f" {figures.percent(model.progress)}"
        name = Content.assemble((model.name, "bold"), (" loading", "$warning"), share)
        return [name, Content.styled(bar(model.progress, width), "$warning")]
    taken = model.gpu_bytes if model.gpu_bytes is not None else model.rss_bytes
    weights = Content.assemble(
        ("weights ", "$text-muted"), figures.size(model.weights_bytes),
        ("  process ", "$text-muted"), figures.size(taken),
    )  # fmt: skip
    return [spread(Content.styled(model.name, "bold"), weights, width), *_cache(model, width)]


def _cache(model: ModelMemory, width: int) -> list[Content]:
    used, cached, free = model.kv_used, model.kv_cached, model.kv_free
    if used is None:
        return [Content.styled("KV —", "$text-muted")]
    if free is None or cached is None:  # a share is all that is told
        return [
            Content.assemble(
                ("KV ", "$text-muted"), (bar(used, max(1, width - 9)), "$primary"),
                f" {figures.percent(used):>5}",
            )
        ]  # fmt: skip
    pieces = stacked((used, cached), used + cached + free, max(_LEAST_BAR, width - 3))
    legend = Content.assemble(
        (FILLS[0], "$primary"), f" used {figures.size(used)}  ",
        (FILLS[1], "$secondary"), f" prefixes {figures.size(cached)}  ",
        f"free {figures.size(free)}",
    )  # fmt: skip
    return [
        Content.assemble(
            ("KV ", "$text-muted"), (pieces[0], "$primary"), (pieces[1], "$secondary"),
            (pieces[-1], "$text-muted"),
        ),
        legend,
    ]  # fmt: skip


def _machine(reading: Memory, width: int) -> list[Content]:
    machine = reading.machine
    if machine is None:
        return []
    lines = [_ram(machine, width)]
    for gpu in machine.gpus:
        lines += _gpu(gpu, width)
    return lines


def _ram(machine: MachineUse, width: int) -> Content:
    total, free = machine.ram_bytes, machine.ram_free_bytes
    used = total - free if total is not None and free is not None else None
    cpu = Content.assemble(("  CPU ", "$text-muted"), f"{figures.percent(machine.cpu):>4}")
    if used is None or total is None:
        return Content.assemble(("RAM ", "$text-muted"), f"{figures.size(free)} free", cpu)
    text = Content.assemble(f" {figures.size(used)} of {figures.size(total)}", cpu)
    return _filled("RAM ", used / total, text, width)


def _gpu(gpu: GpuUse, width: int) -> list[Content]:
    share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else None
    text = Content(f" {figures.size(gpu.used_bytes)} of {figures.size(gpu.total_bytes)}")
    facts = [
        f"busy {figures.percent(gpu.busy)}",
        f"{figures.number(gpu.power_w)}/{figures.number(gpu.power_limit_w)} W",
        f"{figures.count(gpu.temperature_c)} °C",
        f"{figures.count(gpu.clock_mhz)} MHz",
    ]
    named = Content.assemble((f"GPU {gpu.index} ", "$text-muted"), gpu.name)
    return [
        _filled(f"GPU {gpu.index} ", share, text, width),
        spread(named, Content("  ".join(facts)), width),
    ]


def _filled(name: str, share: float | None, text: Content, width: int) -> Content:
    room = max(_LEAST_BAR, width - len(name) - text.cell_length)
    return Content.assemble((name, "$text-muted"), (bar(share, room), "$accent"), text)
