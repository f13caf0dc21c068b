"""Load the built-in model with one number changed, for each value on stdin: a program of a test.

A file of its own, because native code that aborts ends the process.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from gguf_files import rewrite

from localgen.backends.errors import LocalgenError
from localgen.backends.llamacpp import loader
from localgen.backends.memory.system import peak_memory_bytes
from localgen.backends.model_info import LoadOptions, ModelLoadRequest

if __name__ == "__main__":
    # one for all: each would start a process
    loader.Sandbox = functools.cache(loader.Sandbox)  # type: ignore[attr-defined, assignment]
    for line in sys.stdin:
        key, value, kind = json.loads(line)
        path = rewrite(Path(sys.argv[1]), {key: (value, kind)})
        try:
            model = loader.load_llamacpp_model(
                ModelLoadRequest("m", str(path), LoadOptions()), lambda share: None
            )
            outcome: object = model.info.ctx
            model.runner.close()
        except LocalgenError as error:
            outcome = error.message
        print(json.dumps([outcome, peak_memory_bytes()]), flush=True)
