"""Pull a model into the cache: plan which files to download, check the disk space, download."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.units import format_size
from localgen.config import BUILT_IN_MODEL
from localgen.hub import catalog, quant_choice
from localgen.hub.catalog import CatalogEntry
from localgen.hub.download import PullPlan, download_file, downloaded_bytes
from localgen.hub.hf_client import (
    DiskFull,
    HubUnavailable,
    Notify,
    cache_folder,
    forward_warnings,
    repo_folder,
)
from localgen.hub.packaged import PACKAGED_MODELS, SMOLLM2
from localgen.hub.quants import select_quant
from localgen.hub.reference import HubReference, resolve_reference
from localgen.hub.repository import (
    RemoteModel,
    RepoListing,
    list_repo,
    translate_hub_errors,
)
from localgen.hub.resolve import find_target, not_in_catalog
from localgen.hub.unfinished import recorded_pull
from localgen.locked_file import LockedFile


def plan_pull(
    name: str, notify: Notify = lambda line: None, *, allow_paths: bool = True
) -> PullPlan:
    """Look up a name on the hub and plan the download. allow_paths: see find_target.

    Raises InvalidRequest, ModelNotFound, AccessDenied, HubUnavailable or OutOfMemory.
    """
    wanted, why = _resolve_name(name, allow_paths), ""
    try:
        with forward_warnings(notify):
            found = list_repo(wanted.repo, notify)
            if wanted.is_auto and found.gguf_models():
                wanted, why = _resolve_auto(wanted, found)
            if not catalog.same_ignoring_case(wanted.repo, found.repo):
                found = list_repo(wanted.repo, notify)
    except HubUnavailable as error:
        raise HubUnavailable(f"{error.message}; {name} is {wanted.description}") from error
    if wanted.safetensors is not None or not found.gguf_models():
        return replace(_safetensors_plan(wanted, found), quant_reason=why)
    chosen = _select_model(wanted, found)
    called = f"{found.repo}:{chosen.quant}"
    return PullPlan(called, found.repo, found.commit, chosen.files, why)


def run_pull(
    plan: PullPlan, on_bytes: Callable[[int], None], notify: Notify = lambda line: None
) -> None:
    """Download the missing files. on_bytes: receives the number of bytes on disk in total.

    Raises DiskFull before the download starts; download errors are raised as LocalgenErrors.
    """
    require_disk_space(plan)
    with recorded_pull(plan), forward_warnings(notify), translate_hub_errors(plan.repo):
        present = [downloaded_bytes(plan.repo, file) for file in plan.files]
        total = sum(present)
        for file, file_bytes in zip(plan.files, present, strict=True):
            count = partial(_report_total, on_bytes, total - file_bytes)
            download_file(plan.repo, plan.commit, file, count)
            total += file.size_bytes - file_bytes
        folder = repo_folder(plan.repo)
        main = folder / "refs" / "main"
        main.parent.mkdir(parents=True, exist_ok=True)
        # last: a reference to a missing snapshot would make the repository invalid, and so would
        # any other file in refs. The cache may be shared with other users.
        LockedFile(main, mode=0o666, scratch=folder).store(plan.commit)


def _report_total(on_bytes: Callable[[int], None], other_bytes: int, file_bytes: int) -> None:
    on_bytes(other_bytes + file_bytes)


def require_disk_space(plan: PullPlan) -> None:
    """Raise DiskFull, with both numbers, if the missing files do not fit on the disk."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    left = plan.remaining_bytes
    if left > free:
        raise DiskFull(
            f"{plan.name} needs {format_size(left)}, {there} has {format_size(free)} free: "
            "make room (localgen list, localgen rm), or set HF_HUB_CACHE to another folder"
        )


def quant_options(
    listing: RepoListing, entry: CatalogEntry | None, available: quant_choice.AvailableMemory
) -> list[quant_choice.QuantOption]:
    """Return the quantizations of a repository, and the catalog's safetensors sources."""
    files = [
        quant_choice.QuantOption(model.quant, model.size_bytes) for model in listing.gguf_models()
    ]
    return [*files, *quant_choice.safetensors_options(entry, available)]


def _resolve_auto(reference: HubReference, listing: RepoListing) -> tuple[HubReference, str]:
    """Replace `auto` by the best quantization that fits. Returns the reason, too."""
    room = quant_choice.available_memory()
    ways = quant_options(listing, reference.entry, room)
    chosen, why = quant_choice.choose_quant(ways, listing.repo, reference.entry, room)
    quant = chosen.option.quant
    if chosen.option.is_gguf:
        return replace(reference, tag=quant), why
    assert reference.entry is not None, "safetensors options come from the catalog"
    folder = reference.entry.safetensors_source(quant)
    assert folder is not None
    return replace(reference, tag=quant, repo=folder.repo, safetensors=folder), why


def _resolve_name(name: str, allow_paths: bool) -> HubReference:
    target = find_target(name, allow_paths=allow_paths)
    stands_for = target.text
    if target.alias is not None and (stands_for in PACKAGED_MODELS or target.is_path):
        raise InvalidRequest(
            f"{name} stands for {stands_for}: there is nothing to pull; "
            f"`localgen rm {name}` removes the name"
        )
    if stands_for == BUILT_IN_MODEL:
        raise InvalidRequest(f"{name} is built into localgen: there is nothing to pull")
    if stands_for == SMOLLM2:
        raise InvalidRequest(f"{name} is a Python package: `localgen pull {name}` installs it")
    if target.is_path:
        raise InvalidRequest(f"{name} is a path: pull needs a model name, or user/repo[:QUANT]")
    wanted = resolve_reference(stands_for)
    if wanted is None:
        raise not_in_catalog(stands_for)
    return wanted


def _safetensors_plan(reference: HubReference, listing: RepoListing) -> PullPlan:
    files = listing.safetensors_files(
        reference.safetensors.skip_patterns if reference.safetensors else ()
    )
    if not files:
        raise ModelNotFound(
            f"{listing.repo} has neither .gguf files nor config.json with safetensors",
            param="model",
        )
    if reference.safetensors is None and reference.tag is not None and not reference.is_auto:
        raise ModelNotFound(
            f"{listing.repo} has no .gguf files, so no {reference.tag}: "
            f"localgen pull {listing.repo}",
            param="model",
        )
    return PullPlan(listing.repo, listing.repo, listing.commit, files)


def _select_model(reference: HubReference, listing: RepoListing) -> RemoteModel:
    models = listing.gguf_models()
    model = select_quant(models, reference.tag, reference.default_quant)
    if model is None:
        raise _quant_not_found(reference, listing, models)
    return model


def _quant_not_found(
    reference: HubReference, listing: RepoListing, models: list[RemoteModel]
) -> ModelNotFound:
    tag = reference.tag or reference.default_quant
    names = [model.quant for model in models]
    close = difflib.get_close_matches(tag.upper(), names, n=3, cutoff=0.5)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    sizes = ", ".join(f"{model.quant} ({format_size(model.size_bytes)})" for model in models)
    return ModelNotFound(
        f"{listing.repo} has no {tag}.{hint} Available: {sizes}; or auto, the best that fits",
        param="model",
    )
