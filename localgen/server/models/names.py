"""Names of models: each one is that of a single model in lists, answers, log and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.hub.packaged import PACKAGED_MODELS
from localgen.hub.resolve import (
    installed_adapters,
    installed_aliases,
    installed_models,
    installed_presets,
    is_path_text,
    require_unused_name,
    resolve_model,
)
from localgen.server.models.resident import ResidentModel, find_by_short_name, model_id


def resolve_named(name: str | None, *, allow_paths: bool = True) -> ModelFile:
    """As resolve_model, but a model at a path has the name by which it is listed.

    That is the name of an installed model at this path, else its first alias, else that of the
    file. If the latter means another model, the id follows: `tiny@0123456789ab`.
    """
    file = resolve_model(name, allow_paths=allow_paths)
    if file.source != "file":
        return file
    named = [*((each.name, each) for each in installed_models()), *installed_aliases()]
    own = next((name for name, each in named if each.path == file.path), None)
    if own is not None:
        return replace(file, name=own)
    return _with_id(file) if _means_a_model(file.name) else file


def _means_a_model(name: str) -> bool:
    try:
        require_unused_name(name)
    except InvalidRequest:
        return True
    return name in PACKAGED_MODELS


def _with_id(file: ModelFile) -> ModelFile:
    return replace(file, name=f"{file.name}@{model_id(file)}")


def listed_models(residents: Iterable[ResidentModel]) -> dict[str, ModelFile]:
    """Every name that a client may ask for, with its model. Reads the disk.

    Installed models, aliases, models that are loaded from a path without an alias, presets and
    adapters.
    """
    aliases = {name: file for name, file in installed_aliases() if name not in PACKAGED_MODELS}
    listed = {file.name: file for file in installed_models()} | aliases
    paths = {file.path for file in listed.values()}
    loaded = {
        resident.file.name: resident.file
        for resident in residents
        if resident.file.path not in paths
    }
    return listed | loaded | dict(installed_presets()) | dict(installed_adapters())


def find_listed(name: str, residents: Iterable[ResidentModel], *, allow_paths: bool) -> ModelFile:
    """The model of a name, also of one that is loaded from a path. Reads the disk.

    Raises ModelNotFound, InvalidRequest.
    """
    try:
        return resolve_named(name, allow_paths=allow_paths)
    except ModelNotFound:
        resident = find_by_short_name(residents, name, allow_paths)
        if resident is None:
            raise
        return resident.file


def answered_name(requested: str | None, file: ModelFile) -> str:
    """The name of a model in an answer: the client's, unless it has given none, or a path."""
    return file.name if not requested or is_path_text(requested) else requested


class UniqueNames:
    """Keeps names unique as long as a server runs: metrics add up what has the same name.

    The first model of a name has it alone. When another one gets the same name, by a file of the
    same name elsewhere or by an alias that was given to another file, the id follows in both.
    """

    def __init__(self) -> None:
        self._identities: dict[str, set[str]] = {}

    def claim(self, file: ModelFile, residents: Iterable[ResidentModel]) -> ModelFile:
        """The file by its unique name; a resident of the same name is renamed."""
        identities = self._identities.setdefault(file.name, set())
        identities.add(file.identity)
        if len(identities) == 1:
            return file
        for resident in residents:
            if resident.file.name == file.name:
                resident.file = _with_id(resident.file)
        return _with_id(file)
