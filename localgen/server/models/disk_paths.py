"""Paths of this machine's disk, which only clients on the user's own socket receive."""

from __future__ import annotations

import re
from dataclasses import replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import ModelInfo

# The folders of an absolute path in a text. Names of folders may have spaces, quotes and brackets,
# so a component ends only before `: ` and the next path: rather too much is taken than too little.
_START = r"""[\s(\[{<"'`=,:]"""
_COMPONENT = rf"(?:(?!:\s|{_START}~?/)[^/\n])+"
# routes that messages name
_ROUTES = r"v1/(?:embeddings|rerank)(?![^\s,;])"
_FOLDERS = re.compile(rf"(?:^|(?<={_START}))~?/(?![/\s])(?!{_ROUTES})(?:{_COMPONENT}/)*")
# errors about other fields quote what the client sent
_FIELDS_WITH_PATHS = (None, "model", "draft", "options")


def error_message(code: str, message: str, param: str | None, *, is_local: bool) -> str:
    """The message of an error for a client. is_local: it may see paths."""
    quotes_client = code == InvalidRequest.code and param not in _FIELDS_WITH_PATHS
    return message if quotes_client or is_local else without_folders(message)


def without_folders(text: str) -> str:
    """Replace each absolute path by its last component."""
    return _FOLDERS.sub("", text)


def without_paths(info: ModelInfo) -> ModelInfo:
    """The description of a model for clients over TCP."""
    draft, options = info.draft, info.options
    if draft is not None:
        options = replace(options, draft=draft.name)
        draft = replace(draft, path="")
    if options.kv_listen:
        options = replace(options, kv_listen=without_folders(options.kv_listen))
    notes = tuple(map(without_folders, info.notes))
    return replace(info, path="", draft=draft, options=options, notes=notes)
