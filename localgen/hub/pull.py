"""A model from the hub into the cache: what to fetch, whether it fits, then file by file."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.hub import catalog, quant_choice
from localgen.hub.catalog import Entry
from localgen.hub.download import bytes_here, fetch
from localgen.hub.hf_client import DiskFull, HubUnavailable, cache_folder, repo_folder, talking
from localgen.hub.quants import pick
from localgen.hub.reference import Reference, reference
from localgen.hub.repository import Listing, RemoteFile, RemoteModel, listing, translated
from localgen.hub.resolve import BUILT_IN, is_path, meant, unknown

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pull fetches. name: what it is called afterwards. why: what chose the quantization,
    where nobody did."""

    name: str
    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    why: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def left_bytes(self) -> int:
        """What is not here yet."""
        return sum(file.size_bytes - bytes_here(self.repo, file) for file in self.files)

    @property
    def is_here(self) -> bool:
        """Whether every file is, under its name."""
        snapshot = repo_folder(self.repo) / "snapshots" / self.commit
        return all((snapshot / file.path).exists() for file in self.files)


def plan(name: str, say: Say = lambda line: None) -> Plan:
    """Ask the hub what a name means. ModelNotFound, AccessDenied, HubUnavailable, OutOfMemory."""
    wanted, why = _wanted(name), ""
    try:
        with talking(say):
            found = listing(wanted.repo, say)
            if wanted.is_auto and found.models():
                wanted, why = _settled(wanted, found)
            if not catalog.same(wanted.repo, found.repo):
                found = listing(wanted.repo, say)
    except HubUnavailable as error:
        raise HubUnavailable(f"{error.message}; {name} is {wanted.what}") from error
    if wanted.folder is not None or not found.models():
        return replace(_folder_plan(wanted, found), why=why)
    chosen = _chosen(wanted, found)
    called = f"{found.repo}:{chosen.quant}"
    return Plan(called, found.repo, found.commit, chosen.files, why)


def execute(plan: Plan, on_bytes: Callable[[int], None], say: Say = lambda line: None) -> None:
    """Fetch what is missing. on_bytes: how much of the whole is here, from time to time.

    DiskFull: before the first byte; then what fetch raises, as LocalgenErrors.
    """
    require_room(plan)
    with talking(say), translated(plan.repo):
        done = 0
        for file in plan.files:
            count = partial(_count, on_bytes, done)
            fetch(plan.repo, plan.commit, file, count)
            done += file.size_bytes
        main = repo_folder(plan.repo) / "refs" / "main"
        main.parent.mkdir(parents=True, exist_ok=True)
        # last, for a reference to a snapshot that is not there spoils the repository
        main.write_text(plan.commit, encoding="ascii")


def _count(on_bytes: Callable[[int], None], before: int, here: int) -> None:
    on_bytes(before + here)


def require_room(plan: Plan) -> None:
    """DiskFull with both numbers, unless what is missing fits on the disk."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    left = plan.left_bytes
    if left > free:
        raise DiskFull(
            f"{plan.name} needs {left / 1e9:.2f} GB, {there} has {free / 1e9:.2f} GB free: "
            "make room (localgen list, localgen rm), or set HF_HUB_CACHE to a folder elsewhere"
        )


def alternatives(
    found: Listing, entry: Entry | None, room: quant_choice.Room
) -> list[quant_choice.Alternative]:
    """The quantizations of a repository, and what the catalog has beside them."""
    files = [quant_choice.Alternative(model.quant, model.size_bytes) for model in found.models()]
    return [*files, *quant_choice.folder_alternatives(entry, room)]


def _settled(wanted: Reference, found: Listing) -> tuple[Reference, str]:
    """The best that fits instead of `auto`, and why."""
    room = quant_choice.room_here()
    ways = alternatives(found, wanted.entry, room)
    chosen, why = quant_choice.choose(ways, found.repo, wanted.entry, room)
    quant = chosen.alternative.quant
    if chosen.alternative.is_gguf:
        return replace(wanted, tag=quant), why
    assert wanted.entry is not None, "only the catalog has these"
    folder = wanted.entry.folder(quant)
    assert folder is not None
    return replace(wanted, tag=quant, repo=folder.repo, folder=folder), why


def _wanted(name: str) -> Reference:
    stands_for = meant(name)
    if stands_for == BUILT_IN:
        raise InvalidRequest(f"{name} comes with localgen: there is nothing to pull")
    if is_path(stands_for):
        raise InvalidRequest(f"{name} is a path: pull takes a name, or user/repo[:QUANT]")
    wanted = reference(stands_for)
    if wanted is None:
        raise unknown(stands_for)
    return wanted


def _folder_plan(wanted: Reference, found: Listing) -> Plan:
    files = found.folder(wanted.folder.skip if wanted.folder else ())
    if not files:
        raise ModelNotFound(
            f"{found.repo} has no .gguf files, nor config.json and safetensors", param="model"
        )
    if wanted.folder is None and wanted.tag is not None and not wanted.is_auto:
        raise ModelNotFound(
            f"{found.repo} has no .gguf files, so no {wanted.tag}: localgen pull {found.repo}",
            param="model",
        )
    return Plan(found.repo, found.repo, found.commit, files)


def _chosen(wanted: Reference, found: Listing) -> RemoteModel:
    models = found.models()
    model = pick(models, wanted.tag, wanted.default_quant)
    if model is None:
        raise _no_such_quant(wanted, found, models)
    return model


def _no_such_quant(wanted: Reference, found: Listing, models: list[RemoteModel]) -> ModelNotFound:
    tag = wanted.tag or wanted.default_quant
    names = [model.quant for model in models]
    close = difflib.get_close_matches(tag.upper(), names, n=3, cutoff=0.5)
    meant = f" Did you mean {', '.join(close)}?" if close else ""
    sizes = ", ".join(f"{model.quant} ({model.size_bytes / 1e9:.1f} GB)" for model in models)
    return ModelNotFound(
        f"{found.repo} has no {tag}.{meant} There is: {sizes}; or auto, the best that fits",
        param="model",
    )
