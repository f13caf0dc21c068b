"""Types of JSON and TOML that several threads use for the first time at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# each type is new, and large enough for another thread to come in between
RACE = """
import sys, threading, msgspec
from localgen.backends import typed_data

sys.setswitchinterval(1e-6)
fields = [(f"field_{n}", dict[str, list[int]] | None, None) for n in range(60)]

def use(kind, barrier):
    barrier.wait()
    found = typed_data.decode_json('{"inner": {"field_59": {"a": [1]}}}', kind)
    assert found.inner.field_59 == {"a": [1]}
    found = typed_data.convert({"inner": {"field_0": {"a": [2]}}}, kind)
    assert found.inner.field_0 == {"a": [2]}

for n in range(40):
    inner = msgspec.defstruct(f"Inner{n}", fields)
    kind = msgspec.defstruct(f"Outer{n}", [("inner", inner)])
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=use, args=(kind, barrier)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_types_may_be_new_to_several_threads_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RACE], cwd=Path(__file__).parents[1], capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
