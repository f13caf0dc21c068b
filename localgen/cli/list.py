"""`localgen list`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.units import format_size
from localgen.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localgen.client import ModelCard
    from localgen.hub.unfinished import UnfinishedDownload

_NOT_INSTALLED, _UNFINISHED = "not installed", "unfinished"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model with all its names, a preset, an adapter, an alias of a model that is not installed,
    or a download.

    size_bytes: of the whole model, or None if unknown. downloaded_bytes: those on this disk. also:
    other names; for a preset, an adapter and an alias of a model that is not installed, that model.
    """

    name: str
    path: str
    size_bytes: int | None
    state: str
    source: str
    also: tuple[str, ...]
    downloaded_bytes: int


def command(json: JsonFlag = False) -> None:
    """List local models, their other names, unfinished downloads and the use of the disk.

    A preset, an adapter, and an alias of a model that is not installed, is a row of its own, with
    its model under ALSO.
    If the server does not answer, the states are unknown and the exit status is 11.
    """
    from localgen.client import LocalClient
    from localgen.client.errors import ServerNotAnswering
    from localgen.client.local_client import installed_cards

    with closing(LocalClient()) as client:
        try:
            _print_models(client.models(), as_json=json)
        except ServerNotAnswering:
            _print_models(installed_cards("unknown"), as_json=json)
            raise


def _print_models(cards: Sequence[ModelCard], *, as_json: bool) -> None:
    from localgen.backends.terminal_text import escape_name
    from localgen.cli import tables
    from localgen.client.responses import ADAPTER, PRESET
    from localgen.hub.unfinished import unfinished_downloads

    rows = [
        *_installed_rows([card for card in cards if card.source not in (PRESET, ADAPTER)]),
        *_named_rows([card for card in cards if card.source in (PRESET, ADAPTER)]),
        *_missing_rows({card.name for card in cards}),
    ]
    unfinished = unfinished_downloads()
    if as_json:
        tables.print_json([*rows, *map(_download_row, unfinished)])
        return
    cells = [
        (
            escape_name(row.name),
            "unknown" if row.size_bytes is None else format_size(row.size_bytes),
            row.source,
            row.state,
            ", ".join(map(escape_name, row.also)),
        )
        for row in rows
    ]
    tables.print_table(("NAME", "SIZE", "SOURCE", "STATE", "ALSO"), cells)
    for download in unfinished:
        tables.print_notice(_download_text(download, cards))
    _print_disk_use()


def _installed_rows(cards: Sequence[ModelCard]) -> list[ListedModel]:
    """One row per model: a card that follows with the same path is an alias of the first."""
    names: dict[str, list[str]] = {}
    for card in cards:
        names.setdefault(card.path, []).append(card.name)
    first = {card.path: card for card in reversed(cards)}
    rows = []
    for path in names:
        card, (name, *aliases) = first[path], names[path]
        if card.source == "file" and aliases:
            name = aliases.pop(0)  # a file has no other name that commands accept
        also = (*_catalog_names(card), *aliases)
        rows.append(
            ListedModel(name, path, card.size_bytes, card.state, card.source, also, card.size_bytes)
        )
    return rows


def _catalog_names(card: ModelCard) -> list[str]:
    """The name in the catalog, with its quantization unless it is the default one."""
    from localgen.hub import catalog

    repo, _, quant = card.name.partition(":")
    entry = catalog.entry_by_repo(repo) if card.source == "cache" else None
    if entry is None or not quant:
        return []
    is_default = catalog.same_ignoring_case(quant, entry.gguf.quant)
    return [entry.alias if is_default else f"{entry.alias}:{quant}"]


def _named_rows(cards: Sequence[ModelCard]) -> list[ListedModel]:
    """One row per preset and adapter of an installed model. No bytes in the cache are its own."""
    from localgen.hub.models_file import read_models_file

    known = read_models_file()
    named = {name: adapter.model for name, adapter in known.adapters.items()}
    named |= {name: preset.model for name, preset in known.presets.items()}
    return [
        ListedModel(
            *(card.name, card.path, card.size_bytes, card.state, card.source),
            (named[card.name],) if card.name in named else (),
            0,
        )
        for card in cards
    ]


def _missing_rows(installed: set[str]) -> list[ListedModel]:
    """Aliases, presets and adapters of models that are not installed."""
    from localgen.hub.models_file import read_models_file
    from localgen.hub.reference import resolve_reference

    rows, known = [], read_models_file()
    for name, target in known.models.items():
        if name not in installed:
            wanted = resolve_reference(target)
            size = wanted.size_bytes if wanted else None
            kinds = {"preset": known.presets, "adapter": known.adapters}
            kind = next((kind for kind, names in kinds.items() if name in names), "alias")
            rows.append(ListedModel(name, "", size, _NOT_INSTALLED, kind, (target,), 0))
    return rows


def _download_row(download: UnfinishedDownload) -> ListedModel:
    size, done = download.size_bytes, download.downloaded_bytes
    return ListedModel(download.name, "", size, _UNFINISHED, "cache", (), done)


def _download_text(download: UnfinishedDownload, cards: Sequence[ModelCard]) -> str:
    from localgen.hub.hf_client import repo_folder

    name, done = download.name, format_size(download.downloaded_bytes)
    if download.size_bytes is not None:
        size = format_size(download.size_bytes)
        return f"unfinished: {name}, {done} of {size}; run `localgen pull {name}` to resume"
    text = f"unfinished: {name}, {done}, left by another program"
    if any(card.name.partition(":")[0] == name for card in cards):
        # rm would remove the model
        return f"{text} in {repo_folder(name) / 'blobs'}"
    return f"{text}; `localgen rm {name}` removes it"


def _print_disk_use() -> None:
    from localgen.cli import tables
    from localgen.hub.cache import scan_hf_cache

    found = scan_hf_cache()
    if found is None or not (found.size_on_disk or found.incomplete_files):
        return
    unfinished = found.incomplete_size_on_disk
    more = f", plus {format_size(unfinished)} in unfinished downloads" if unfinished else ""
    tables.print_notice(f"{format_size(found.size_on_disk)} in {found.cache_dir}{more}")
