"""Write a wheel's SBOM beside it, in CycloneDX's JSON: python requirements/sbom.py dist/X.whl

Its components are what `pip install X.whl` brings, at the versions of this environment, and the
built-in model. The same wheel and environment give the same file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import uuid
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MODEL = "localgen/models/tiny.gguf"
Component = dict[str, Any]


def main() -> None:
    for wheel in map(Path, sys.argv[1:]):
        name, version = wheel.name.split("-")[:2]
        target = wheel.with_name(f"{name}-{version}.cdx.json")
        target.write_text(json.dumps(sbom(wheel), indent=2) + "\n")


def sbom(wheel: Path) -> dict[str, Any]:
    """The document. Raises PackageNotFoundError if a dependency of the wheel is not installed."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
        model_hash = hashlib.sha256(archive.read(MODEL)).hexdigest()
    root = component(metadata, "application") | {"hashes": sha256(digest)}
    model: Component = {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": "tiny",
        "version": metadata["Version"],
        "hashes": sha256(model_hash),
    }
    packages, edges = closure(metadata)
    edges[root["bom-ref"]].append(MODEL)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"component": root},
        "components": [model, *packages],
        "dependencies": [{"ref": ref, "dependsOn": needed} for ref, needed in edges.items()],
    }


def closure(metadata: Message) -> tuple[list[Component], dict[str, list[str]]]:
    """The packages that `metadata` needs, directly or not, and who needs which (bom-refs)."""
    found: dict[str, Component] = {}
    edges: dict[str, list[str]] = {}
    waiting: list[tuple[Message, set[str]]] = [(metadata, set())]
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        package, extras = waiting.pop()
        needed = edges.setdefault(purl(package), [])
        for requirement in required(package, extras):
            name = canonicalize_name(requirement.name)
            # importlib's stubs declare a protocol; it is a Message
            other: Any = importlib.metadata.metadata(name)
            found[name] = component(other, "library")
            if purl(other) not in needed:
                needed.append(purl(other))
            if (name, frozenset(requirement.extras)) not in done:
                done.add((name, frozenset(requirement.extras)))
                waiting.append((other, requirement.extras))
    for needed in edges.values():
        needed.sort()
    return [found[name] for name in sorted(found)], edges


def required(package: Message, extras: set[str]) -> list[Requirement]:
    """Requirements of a package on this platform, with those of the extras asked for."""
    requirements = map(Requirement, package.get_all("Requires-Dist", []))
    chosen = extras or {""}
    return [
        one
        for one in requirements
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in chosen)
    ]


def component(metadata: Message, kind: str) -> Component:
    entry: Component = {
        "type": kind,
        "bom-ref": purl(metadata),
        "name": metadata["Name"],
        "version": metadata["Version"],
        "purl": purl(metadata),
    }
    expression, text = metadata["License-Expression"], metadata["License"]
    if expression:
        entry["licenses"] = [{"expression": expression}]
    elif text and "\n" not in text:  # some packages put the whole text there
        entry["licenses"] = [{"license": {"name": text}}]
    return entry


def purl(metadata: Message) -> str:
    return f"pkg:pypi/{canonicalize_name(metadata['Name'])}@{metadata['Version']}"


def sha256(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


if __name__ == "__main__":
    main()
