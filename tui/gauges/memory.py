"""The memory gauge: weights and KV cache per model, kept prefixes, process memory, RAM and GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from localgen.backends.engine_stats import KVTierStats, kv_tier_name
from localgen.backends.machine_stats import GpuStats, MachineStats
from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.plots import BAR_EMPTY, BAR_FILLS, bar, stacked_bar
from localgen.tui.gauges.samples import MemorySample, ModelMemory
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import (
    format_bytes,
    format_bytes_of,
    format_duration_s,
    format_integer,
    format_number,
    format_percent,
)

_MIN_BAR_COLUMNS = 6


class MemoryGauge(Gauge[MemorySample]):
    """Models, then kept prefixes, then RAM and CPU, then GPUs."""

    def __init__(self) -> None:
        super().__init__("Memory", id="memory")

    def border_texts(self, sample: MemorySample) -> tuple[str, str]:
        """What kept prefixes saved; memory of the server process without the model processes."""
        known = sample.server_bytes is not None
        foot = f"server {format_bytes(sample.server_bytes)}" if known else ""
        return _tiers_summary(sample.kv_tiers), foot

    def lines(self, sample: MemorySample, width: int, height: int) -> list[Content]:
        """Up to four lines per model; machine memory below; kept prefixes in the room between."""
        models = sample.models or ()
        # at least one line per model, as long as one is left for the machine
        machine = _machine_lines(sample, width, max(1, height - max(1, len(models))))
        room = height - len(machine)
        if not models:
            says = "no model is loaded" if sample.models is not None else ""
            return [Content.styled(says, "$muted"), *machine]
        each = max(1, room // len(models))
        lines = [line for model in models for line in _model_lines(model, width)[:each]]
        if len(lines) > room:
            hidden = len(models) - max(0, room - 1)
            lines = [*lines[: max(0, room - 1)], Content.styled(f"… {hidden} more", "$muted")]
        return [*lines, *_tiers_lines(sample.kv_tiers, width, room - len(lines)), *machine]


def _model_lines(model: ModelMemory, width: int) -> list[Content]:
    if model.state == "loading":
        share = f" {format_percent(model.progress)}"
        name = Content.assemble((model.name, "bold"), (" loading", "$warning"), share)
        return [name, Content.styled(bar(model.progress, width), "$warning")]
    taken = model.gpu_bytes if model.gpu_bytes is not None else model.rss_bytes
    weights = Content.assemble(
        ("weights ", "$muted"), format_bytes(model.weights_bytes),
        ("  process ", "$muted"), format_bytes(taken),
    )  # fmt: skip
    name, kv = Content.styled(model.name, "bold"), _kv_cache_lines(model, width)
    if name.cell_length + weights.cell_length < width:
        return [align_ends(name, weights, width), *kv]
    is_known = model.weights_bytes is not None or taken is not None
    return [name, *kv, weights] if is_known else [name, *kv]


def _kv_cache_lines(model: ModelMemory, width: int) -> list[Content]:
    used, cached, free = model.kv_used, model.kv_cached, model.kv_free
    if used is None:
        return [Content.styled("KV —", "$muted")]
    if free is None or cached is None:  # the server reports only the used fraction
        return [
            Content.assemble(
                ("KV ", "$muted"), (bar(used, max(1, width - 9)), "$primary"),
                f" {format_percent(used):>5}",
            )
        ]  # fmt: skip
    pieces = stacked_bar((used, cached), used + cached + free, max(_MIN_BAR_COLUMNS, width - 3))
    return [
        Content.assemble(
            ("KV ", "$muted"), (pieces[0], "$primary"), (pieces[1], "$secondary"),
            (pieces[-1], "$muted"),
        ),
        _legend(used, cached, free, width),
    ]  # fmt: skip


def _legend(used: float, cached: float, free: float, width: int) -> Content:
    """Legend of the bar's characters, with words if they fit."""
    sizes = [format_bytes(each) for each in (used, cached, free)]
    for words in (("used ", "prefixes ", "free "), ("used ", "kept ", "")):
        if sum(map(len, (*sizes, *words))) + 8 <= width:
            break
    else:
        words = ("", "", "")
    return Content.assemble(
        (BAR_FILLS[0], "$primary"), f" {words[0]}{sizes[0]} ",
        (BAR_FILLS[1], "$secondary"), f" {words[1]}{sizes[1]} ",
        (BAR_EMPTY, "$muted"), f" {words[2]}{sizes[2]}",
    )  # fmt: skip


def _tiers_summary(tiers: Sequence[KVTierStats]) -> str:
    """Why a tier is not written any more, else the time that all of them saved."""
    for tier in tiers:
        if tier.error:
            return f"· {_tier_name(tier)}: {one_line(tier.error)}"
    saved_s = sum(tier.saved_s_total for tier in tiers)
    if saved_s < 1:
        return ""
    used = [_tier_name(tier) for tier in tiers if tier.saved_s_total]
    return f"· {' and '.join(used)} saved {format_duration_s(saved_s)}"


def _tier_name(tier: KVTierStats) -> str:
    return one_line(kv_tier_name(tier.tier))


def _tiers_lines(tiers: Sequence[KVTierStats], width: int, rows: int) -> list[Content]:
    """One or two lines per tier, as many as there are rows."""
    each = 2 if 2 * len(tiers) <= rows else 1
    lines = [line for tier in tiers for line in _tier_lines(tier, width)[:each]]
    return lines[: max(0, rows)]


def _tier_lines(tier: KVTierStats, width: int) -> list[Content]:
    """Size; then tokens and time, or why nothing is written, which is also in the frame."""
    limit = tier.limit_bytes
    size = Content(f" {format_bytes_of(tier.num_bytes, limit)}") if limit else Content("")
    share = tier.num_bytes / limit if limit else None
    reused = Content.assemble(
        (format_integer(tier.hit_tokens_total), "bold"), (" tokens reused", "$muted")
    )
    saved = Content.assemble((format_duration_s(tier.saved_s_total), "bold"), (" saved", "$muted"))
    detail = align_ends(reused, saved, width)
    if tier.error:
        what = "not written" if limit else "no blocks"
        detail = Content.styled(f"{what}: {one_line(tier.error)}", "$error")
    return [_labelled_bar(f"KV {_tier_name(tier)} ", share, size, width), detail]


def _machine_lines(sample: MemorySample, width: int, rows: int) -> list[Content]:
    """RAM, then one or two lines per GPU; GPUs that do not fit share one line."""
    machine = sample.machine
    if machine is None:
        return []
    gpus, room = machine.gpus, rows - 1
    each = 2 if 2 * len(gpus) <= room else 1
    shown = len(gpus) if len(gpus) <= room else max(0, room - 1)
    lines = [_ram_line(machine, width)]
    lines += [line for gpu in gpus[:shown] for line in _gpu_lines(gpu, width)[:each]]
    if shown < len(gpus) and room:
        count = f"{len(gpus) - shown} more" if shown else f"{len(gpus)}"
        lines.append(
            _combined_gpus(gpus[shown:], f"{count} GPU{'s' if len(gpus) > 1 else ''} ", width)
        )
    return lines


def _ram_line(machine: MachineStats, width: int) -> Content:
    total, free = machine.ram_bytes, machine.ram_free_bytes
    used = total - free if total is not None and free is not None else None
    cpu = Content.assemble((" CPU ", "$muted"), f"{format_percent(machine.cpu):>4}")
    if used is None or total is None:
        return Content.assemble(("RAM ", "$muted"), f"{format_bytes(free)} free", cpu)
    text = Content(f" {format_bytes_of(used, total)}")
    if width - 4 - text.cell_length - cpu.cell_length >= _MIN_BAR_COLUMNS:
        text = Content.assemble(text, cpu)
    return _labelled_bar("RAM ", used / total, text, width)


def _gpu_lines(gpu: GpuStats, width: int) -> list[Content]:
    share = gpu.used_bytes / gpu.total_bytes if gpu.total_bytes else None
    text = Content(f" {format_bytes_of(gpu.used_bytes, gpu.total_bytes)}")
    facts = [
        f"busy {format_percent(gpu.busy)}",
        f"{format_number(gpu.power_w)}/{format_number(gpu.power_limit_w)} W",
        f"{format_integer(gpu.temperature_c)} °C",
        f"{format_integer(gpu.clock_mhz)} MHz",
    ]
    while len("  ".join(facts)) > width:
        facts.pop()
    named = Content.styled(one_line(gpu.name), "$muted")
    return [
        _labelled_bar(f"GPU {gpu.index} ", share, text, width),
        align_ends(Content("  ".join(facts)), named, width),
    ]


def _combined_gpus(gpus: Sequence[GpuStats], name: str, width: int) -> Content:
    """The total memory of several GPUs."""
    used, total = sum(gpu.used_bytes for gpu in gpus), sum(gpu.total_bytes for gpu in gpus)
    text = Content(f" {format_bytes_of(used, total)}")
    return _labelled_bar(name, used / total if total else None, text, width)


def _labelled_bar(name: str, fraction: float | None, text: Content, width: int) -> Content:
    room = max(_MIN_BAR_COLUMNS // 2, width - len(name) - text.cell_length)
    return Content.assemble((name, "$muted"), (bar(fraction, room), "$accent"), text)
