"""Where memory goes: of each model weights and cache, beside processes and machine."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from localgen.backends.machine_stats import GpuUse, MachineUse
from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.plots import EMPTY, FILLS, bar, spread, stacked
from localgen.tui.gauges.samples import Memory, ModelMemory
from localgen.tui.widgets import numbers

_LEAST_BAR = 6


class MemoryGauge(Gauge[Memory]):
    """Models, then main memory and CPU, then GPUs."""

    def __init__(self) -> None:
        super().__init__("Memory", id="memory")

    def frame(self, reading: Memory) -> tuple[str, str]:
        """What the server itself takes, beside the processes of its models."""
        known = reading.server_bytes is not None
        return "", f"server {numbers.size(reading.server_bytes)}" if known else ""

    def lines(self, reading: Memory, width: int, height: int) -> list[Content]:
        """Models, each in three lines or fewer; the machine below them."""
        models = reading.models or ()
        # a line for each model at least, as far as that leaves one for the machine
        machine = _machine(reading, width, max(1, height - max(1, len(models))))
        room = height - len(machine)
        if not models:
            says = "no model is loaded" if reading.models is not None else ""
            return [Content.styled(says, "$muted"), *machine]
        each = max(1, min(3, room // len(models)))
        lines = [line for model in models for line in _model(model, width)[:each]]
        if len(lines) > room:
            hidden = len(models) - max(0, room - 1)
            lines = [*lines[: max(0, room - 1)], Content.styled(f"… {hidden} more", "$muted")]
        return [*lines, *machine]


def _model(model: ModelMemory, width: int) -> list[Content]:
    if model.state == "loading":
        share = f" {numbers.percent(model.progress)}"
        name = Content.assemble((model.name, "bold"), (" loading", "$warning"), share)
        return [name, Content.styled(bar(model.progress, width), "$warning")]
    taken = model.gpu_bytes if model.gpu_bytes is not None else model.rss_bytes
    weights = Content.assemble(
        ("weights ", "$muted"), numbers.size(model.weights_bytes),
        ("  process ", "$muted"), numbers.size(taken),
    )  # fmt: skip
    return [spread(Content.styled(model.name, "bold"), weights, width), *_cache(model, width)]


def _cache(model: ModelMemory, width: int) -> list[Content]:
    used, cached, free = model.kv_used, model.kv_cached, model.kv_free
    if used is None:
        return [Content.styled("KV —", "$muted")]
    if free is None or cached is None:  # a share is all that is told
        return [
            Content.assemble(
                ("KV ", "$muted"), (bar(used, max(1, width - 9)), "$primary"),
                f" {numbers.percent(used):>5}",
            )
        ]  # fmt: skip
    pieces = stacked((used, cached), used + cached + free, max(_LEAST_BAR, width - 3))
    return [
        Content.assemble(
            ("KV ", "$muted"), (pieces[0], "$primary"), (pieces[1], "$secondary"),
            (pieces[-1], "$muted"),
        ),
        _legend(used, cached, free, width),
    ]  # fmt: skip


def _legend(used: float, cached: float, free: float, width: int) -> Content:
    """Which characters mean what, in words where there is room for them."""
    sizes = [numbers.size(each) for each in (used, cached, free)]
    for words in (("used ", "prefixes ", "free "), ("used ", "kept ", "")):
        if sum(map(len, (*sizes, *words))) + 8 <= width:
            break
    else:
        words = ("", "", "")
    return Content.assemble(
        (FILLS[0], "$primary"), f" {words[0]}{sizes[0]} ",
        (FILLS[1], "$secondary"), f" {words[1]}{sizes[1]} ",
        (EMPTY, "$muted"), f" {words[2]}{sizes[2]}",
    )  # fmt: skip


def _machine(reading: Memory, width: int, rows: int) -> list[Content]:
    """Main memory, then each GPU in two lines, or in one; those without room together."""
    machine = reading.machine
    if machine is None:
        return []
    gpus, room = machine.gpus, rows - 1
    each = 2 if 2 * len(gpus) <= room else 1
    shown = len(gpus) if len(gpus) <= room else max(0, room - 1)
    lines = [_ram(machine, width)]
    lines += [line for gpu in gpus[:shown] for line in _gpu(gpu, width)[:each]]
    if shown < len(gpus) and room:
        count = f"{len(gpus) - shown} more" if shown else f"{len(gpus)}"
        lines.append(_together(gpus[shown:], f"{count} GPU{'s' if len(gpus) > 1 else ''} ", width))
    return lines


def _ram(machine: MachineUse, width: int) -> Content:
    total, free = machine.ram_bytes, machine.ram_free_bytes
    used = total - free if total is not None and free is not None else None
    cpu = Content.assemble((" CPU ", "$muted"), f"{numbers.percent(machine.cpu):>4}")
    if used is None or total is None:
        return Content.assemble(("RAM ", "$muted"), f"{numbers.size(free)} free", cpu)
    text = Content(f" {numbers.part_of(used, total)}")
    if width - 4 - text.cell_length - cpu.cell_length >= _LEAST_BAR:
        text = Content.assemble(text, cpu)
    return _filled("RAM ", used / total, text, width)


def _gpu(gpu: GpuUse, width: int) -> list[Content]:
    share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else None
    text = Content(f" {numbers.part_of(gpu.used_bytes, gpu.total_bytes)}")
    facts = [
        f"busy {numbers.percent(gpu.busy)}",
        f"{numbers.number(gpu.power_w)}/{numbers.number(gpu.power_limit_w)} W",
        f"{numbers.count(gpu.temperature_c)} °C",
        f"{numbers.count(gpu.clock_mhz)} MHz",
    ]
    while len("  ".join(facts)) > width:
        facts.pop()
    named = Content.styled(one_line(gpu.name), "$muted")
    return [
        _filled(f"GPU {gpu.index} ", share, text, width),
        spread(Content("  ".join(facts)), named, width),
    ]


def _together(gpus: Sequence[GpuUse], name: str, width: int) -> Content:
    """The memory of several."""
    used, total = sum(gpu.used_bytes for gpu in gpus), sum(gpu.total_bytes for gpu in gpus)
    text = Content(f" {numbers.part_of(used, total)}")
    return _filled(name, used / total if total else None, text, width)


def _filled(name: str, share: float | None, text: Content, width: int) -> Content:
    room = max(_LEAST_BAR // 2, width - len(name) - text.cell_length)
    return Content.assemble((name, "$muted"), (bar(share, room), "$accent"), text)
