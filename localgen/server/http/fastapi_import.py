"""Imports FastAPI without building its models of OpenAPI, which only /openapi.json needs.

Pydantic would build each of forty models with all that it refers to, in a quarter of the time that
the server takes to start. To be imported before fastapi.
"""

from __future__ import annotations

import importlib

from pydantic import BaseModel


def _import_fastapi() -> None:
    # models inherit it: those of this import are built when they are first used
    BaseModel.model_config["defer_build"] = True
    try:
        importlib.import_module("fastapi.openapi.models")
    finally:
        del BaseModel.model_config["defer_build"]


_import_fastapi()
